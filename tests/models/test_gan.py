from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.attacks.generators import CONDITIONAL, LINEAR
from tests.seeds import replayed

from leaktight.core.errors import ModelError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.rng import global_seed
from leaktight.core.tensors import digest
from leaktight.data.embedded import Digits
from leaktight.models.gan import Dcgan, DcganNetwork, GeneratorSource, MlpGan, MlpNetwork, OwnGenerator
from leaktight.models.gan_training import GanTraining


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        (Images(3, 64, 64), [16, 8, 8, 4]),
        (Images(1, 28, 28), [8, 4]),
        (Images(3, 32, 100), [8, 4, 4]),
        (Images(1, 9, 10), [4]),
    ],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_dcgan_is_read_off_its_weights(tmp_path: Path, shape: Images, widths: list[int], suffix: str) -> None:
    with global_seed(replayed(0)):
        network = DcganNetwork(5, widths, shape).eval()
    path = tmp_path / f"generator{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in network.state_dict().items()}}, path)
    else:
        save_file(network.state_dict(), path, metadata={"shape": ",".join(map(str, shape.shape))})
    generator = Dcgan(path=str(path)).read()
    multiples = all(side % 2 ** len(widths) == 0 for side in shape.shape[1:])
    assert generator.latent == 5
    if suffix == ".pth" and not multiples:  # a bare file cannot say that the edges are cut off
        assert all(own >= side for own, side in zip(generator.makes.shape, shape.shape, strict=True))
        return
    assert generator.makes == shape
    latents = torch.randn(3, 5, generator=replayed(1).public())
    images = generator.sample(latents)
    assert torch.allclose(images, (network(latents).detach() + 1) / 2, atol=1e-6)
    assert 0 <= float(images.min()) < float(images.max()) <= 1


def test_an_mlp_is_read_off_its_weights(tmp_path: Path) -> None:
    with global_seed(replayed(0)):
        network = MlpNetwork([4, 6, 5, 12], Images(3, 2, 2))
    torch.save(network.layers.state_dict(), tmp_path / "g.ckpt")
    generator = MlpGan(path=str(tmp_path / "g.ckpt"), shape=(3, 2, 2)).read()
    latents = torch.randn(2, 4, generator=replayed(1).public())
    assert torch.allclose(generator.sample(latents), (network(latents).detach() + 1) / 2)
    with pytest.raises(ModelError, match="expected linear layers that end in 784 outputs"):
        MlpGan(path=str(tmp_path / "g.ckpt")).read()


def test_a_generator_of_ones_own_takes_classes_if_it_says_so() -> None:
    latents = torch.randn(2, 3, generator=replayed(1).public())
    plain, asked = LINEAR.read(), CONDITIONAL.read()
    assert (plain.num_classes, asked.num_classes) == (None, 3)
    ones, twos = (asked.sample(latents, torch.full((2,), label)) for label in (1, 2))
    assert plain.sample(latents).shape == ones.shape == (2, 1, 4, 4)
    assert not torch.allclose(ones, twos)
    assert all(not parameter.requires_grad for parameter in plain.network.parameters())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Dcgan(path="absent.pth"), "expected a file of weights at absent.pth, got none"),
        (Dcgan(path="absent.txt"), "expected a file of weights ending in"),
        (OwnGenerator(target="tests.attacks.generators:flat", latent=3), r"make images \(2, C, H, W\) .* got 2 x 3"),
        (OwnGenerator(target="tests.attacks.generators:absent", latent=3), "has no 'absent'"),
        (OwnGenerator(target=LINEAR.target, latent=3, path="absent.pth"), "expected a file of weights at absent.pth"),
    ],
)
def test_what_cannot_be_loaded_is_named(source: GeneratorSource, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        source.read()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(3, 3)}, tmp_path / "linear.pth")
    with pytest.raises(ModelError, match="expected transposed convolutions of a DCGAN"):
        Dcgan(path=str(tmp_path / "linear.pth")).read()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OwnGenerator(target="nowhere", latent=3), "package.module:name"),
        (lambda: OwnGenerator(target=LINEAR.target, latent=0), "latent"),
        (lambda: OwnGenerator(target=LINEAR.target, latent=3, num_classes=0), "num_classes"),
        (lambda: OwnGenerator(target=LINEAR.target, latent=3, output="bytes"), "output"),  # type: ignore[arg-type]
        (lambda: MlpGan(path="x", shape=(0, 1, 1)), "shape"),
        (lambda: GanTraining(kind="vae"), "kind"),  # type: ignore[arg-type]
        (lambda: GanTraining(epochs=0), "epochs"),
        (lambda: GanTraining(batch_size=1), "batch_size"),
        (lambda: GanTraining(average=1.0), "average"),
        (lambda: GanTraining(learning_rate=0.0), "learning_rate"),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def digits(count: int) -> torch.Tensor:
    return Digits(size=8).load(Path()).test.inputs[:count]


@pytest.mark.parametrize("kind", ["dcgan", "wgan_gp"])
def test_training_is_the_same_for_the_same_seed(kind: Any) -> None:
    training = GanTraining(kind=kind, epochs=2, batch_size=16, latent=4, width=4)
    told: list[int] = []
    first, again, other = (
        training.train(digits(40), rng=replayed(seed), after_epoch=lambda epoch, critic, generator: told.append(epoch))
        for seed in (0, 0, 1)
    )
    assert told == [1, 2] * 3
    weights = [digest(dict(network.state_dict())) for network in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    images = first(torch.randn(5, 4, generator=replayed(2).public()))
    assert images.shape == (5, 1, 8, 8)
    assert bool(images.isfinite().all())


@pytest.mark.parametrize("kind", ["dcgan", "wgan_gp"])
def test_samples_come_nearer_to_the_images(kind: Any) -> None:
    """All images are one half bright, one half dark; a generator has to learn where the edge is."""
    images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    images[..., :4] = 255
    latents = torch.randn(16, 4, generator=replayed(3).public())
    errors = []
    for epochs in (1, 60):
        training = GanTraining(
            kind=kind, epochs=epochs, batch_size=16, latent=4, width=8, average=0.9, learning_rate=2e-3
        )
        made = training.train(images, rng=replayed(0))(latents)
        errors.append(float((made - (images[:1].float() / 127.5 - 1)).square().mean()))
    assert errors[1] < 0.3 * errors[0]


def test_length_and_width_follow_the_data() -> None:
    training = GanTraining(batch_size=32, width=8)
    assert training.num_epochs(320) == 300
    assert training.num_epochs(10**6) == 1
    assert GanTraining(kind="wgan_gp", batch_size=32).num_epochs(320) == 900
    assert training.widths(Images(3, 64, 64)) == [64, 32, 16, 8]
    assert training.widths(Images(1, 28, 28)) == [16, 8]
    with pytest.raises(UsageError, match="at least 2 images"):
        training.train(digits(1), rng=replayed(0))
    with pytest.raises(UsageError, match="at least 8x8 pixels"):
        training.train(torch.zeros(4, 1, 4, 4, dtype=torch.uint8), rng=replayed(0))


def test_published_generators_make_images(real_data: Path) -> None:
    faces = Dcgan(path=str(real_data / "gan_dcgan_faces64" / "netG_digiface64.pth")).read()
    assert (faces.latent, faces.makes) == (100, Images(3, 64, 64))
    mnist = MlpGan(path=str(real_data / "gan_mnist_mlp" / "G--300.ckpt")).read()
    assert (mnist.latent, mnist.makes) == (64, Images(1, 28, 28))
    for generator, dark in ((faces, False), (mnist, True)):
        images = generator.sample(torch.randn(8, generator.latent, generator=replayed(0).public()))
        assert (float(images.median()) < 0.05) is dark
        assert float(images.std()) > 0.1
