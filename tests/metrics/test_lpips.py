"""LPIPS against torchmetrics' own code and against the formula in float64 numpy; and what happens without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from tests.seeds import replayed
from torch import Tensor, nn
from torchmetrics.functional.image import lpips as theirs

from leaktight.core.errors import UsageError
from leaktight.metrics import Lpips, LpipsUnavailable

Net = Literal["alex", "vgg"]
NETS: tuple[Net, ...] = ("alex", "vgg")
FILES = {"alex": "alexnet_features.pth", "vgg": "vgg16_features.pth"}
FULL_FILES = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}
Array = NDArray[np.float64]


@pytest.fixture
def root(real_data: Path) -> Path:
    if not (real_data / "lpips_trunks").is_dir():
        pytest.skip(f"no ImageNet trunks in {real_data / 'lpips_trunks'}")
    return real_data


def weights(root: Path, net: Net) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(root / "lpips_trunks" / FILES[net], weights_only=True)
    return loaded


def blobs(count: int, side: int, seed: int, channels: int = 3) -> Tensor:
    """Smooth random images: more like photographs than white noise."""
    coarse = torch.rand(count, channels, 6, 6, generator=replayed(seed).public())
    return nn.functional.interpolate(coarse, size=side, mode="bicubic").clamp(0, 1)


def torchvision_features(net: Net) -> nn.Sequential:
    """The layers as torchvision lists them, written out anew."""
    if net == "alex":
        return nn.Sequential(
            *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
    layers: list[nn.Module] = []
    before = 3
    for code in "aaMbbMcccMdddMdddM":
        if code == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            after = {"a": 64, "b": 128, "c": 256, "d": 512}[code]
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            before = after
    return nn.Sequential(*layers)


@pytest.mark.parametrize("net", NETS)
def test_agrees_with_torchmetrics(net: Net, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = torchvision_features(net)
    trunk.load_state_dict({name.removeprefix("features."): value for name, value in weights(root, net).items()})
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda *args: trunk)
    reference = theirs._LPIPS(net=net)
    mine = Lpips(net=net, root=root)
    for side in (32, 49):
        guess, truth = blobs(3, side, 0), blobs(3, side, 1)
        expected = reference(guess, truth, normalize=True).flatten().to(torch.float64)
        assert float(expected.min()) > 0.05
        assert torch.allclose(mine(guess, truth), expected, rtol=1e-4, atol=1e-6)


def convolve(x: Array, weight: Array, bias: Array, stride: int, padding: int) -> Array:
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    windows = sliding_window_view(padded, weight.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
    summed: Array = np.einsum("chwij,ocij->ohw", windows, weight)
    return summed + bias[:, None, None]


def alexnet_maps(image: Array, saved: dict[str, Array]) -> list[Array]:
    maps = []
    x = image
    for place, stride, padding, pool_first in ((0, 4, 2, 0), (3, 1, 2, 1), (6, 1, 1, 1), (8, 1, 1, 0), (10, 1, 1, 0)):
        if pool_first:
            x = sliding_window_view(x, (3, 3), axis=(1, 2))[:, ::2, ::2].max(axis=(-2, -1))
        x = convolve(x, saved[f"features.{place}.weight"], saved[f"features.{place}.bias"], stride, padding)
        x = np.maximum(x, 0)
        maps.append(x)
    return maps


def test_agrees_with_the_formula_in_float64(root: Path) -> None:
    saved = {name: value.double().numpy() for name, value in weights(root, "alex").items()}
    head_file = Path(theirs.__file__).parent / "lpips_models" / "alex.pth"
    heads = list(torch.load(head_file, map_location="cpu", weights_only=True).values())
    pair = blobs(1, 40, 0), blobs(1, 40, 1)
    mean, std = np.array([-0.030, -0.088, -0.188]), np.array([0.458, 0.448, 0.450])
    inputs = [((2 * x[0].double().numpy() - 1) - mean[:, None, None]) / std[:, None, None] for x in pair]
    total = 0.0
    for head, a, b in zip(heads, *(alexnet_maps(x, saved) for x in inputs), strict=True):
        gap = (a / (np.linalg.norm(a, axis=0) + 1e-10) - b / (np.linalg.norm(b, axis=0) + 1e-10)) ** 2
        total += float((gap * head.double().numpy().reshape(-1, 1, 1)).sum(0).mean())
    assert float(Lpips(net="alex", root=root)(*pair)) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("net", NETS)
def test_zero_symmetric_and_growing_with_noise(net: Net, root: Path) -> None:
    metric = Lpips(net=net, root=root)
    truth = blobs(2, 32, 0)
    noise = torch.randn(truth.shape, generator=replayed(1).public())
    assert metric(truth, truth).tolist() == [0, 0]
    by_noise = torch.stack([metric((truth + strength * noise).clamp(0, 1), truth) for strength in (0.02, 0.1, 0.4)])
    assert bool((by_noise.diff(dim=0) > 0).all())
    other = blobs(2, 32, 2)
    assert torch.allclose(metric(truth, other), metric(other, truth))
    assert torch.equal(metric(3 * other - 1, truth), metric((3 * other - 1).clamp(0, 1), truth))


def test_each_example_is_scored_by_itself_beyond_one_chunk(root: Path) -> None:
    metric = Lpips(net="alex", root=root)
    guess, truth = blobs(35, 32, 0), blobs(35, 32, 1)
    together = metric(guess, truth)
    assert together.shape == (35,)
    for row in (0, 31, 32, 34):
        assert float(metric(guess[[row]], truth[[row]])) == pytest.approx(float(together[row]), rel=1e-4)


@pytest.mark.parametrize(("net", "least"), [("alex", 31), ("vgg", 16)])
def test_only_images_too_small_for_the_trunk_are_enlarged(net: Net, least: int, root: Path) -> None:
    metric = Lpips(net=net, root=root)
    enough = blobs(1, least, 0), blobs(1, least, 1)
    small = blobs(1, least - 3, 0), blobs(1, least - 3, 1)
    grown = [nn.functional.interpolate(x, size=least, mode="bilinear") for x in small]
    assert float(metric(*small)) == pytest.approx(float(metric(*grown)), rel=1e-4)
    assert [tuple(metric._inputs(x).shape[2:]) for x in (*enough, *small)] == [(least, least)] * 4
    assert tuple(metric._inputs(torch.zeros(1, 3, 10, 25)).shape[2:]) == (least, -(-25 * least // 10))
    trunk = metric._network.trunk
    with pytest.raises(RuntimeError, match="too small"):
        trunk(torch.zeros(1, 3, least - 1, least - 1))


def test_grey_images_are_repeated_to_three_channels(root: Path) -> None:
    metric = Lpips(net="alex", root=root)
    guess, truth = blobs(1, 32, 0, channels=1), blobs(1, 32, 1, channels=1)
    assert torch.equal(metric(guess, truth), metric(guess.expand(-1, 3, -1, -1), truth.expand(-1, 3, -1, -1)))
    with pytest.raises(UsageError, match="1 or 3 channels"):
        metric(torch.zeros(1, 2, 32, 32), torch.zeros(1, 2, 32, 32))


@pytest.mark.parametrize("folder", [".", "lpips_trunks"])
def test_takes_torchvisions_own_file(folder: str, root: Path, tmp_path: Path) -> None:
    """The whole network's file holds the classifier too."""
    (tmp_path / folder).mkdir(exist_ok=True)
    whole = weights(root, "alex") | {"classifier.1.weight": torch.zeros(2, 2)}
    torch.save(whole, tmp_path / folder / FULL_FILES["alex"])
    guess, truth = blobs(1, 32, 0), blobs(1, 32, 1)
    assert torch.equal(Lpips(root=tmp_path)(guess, truth), Lpips(root=root)(guess, truth))


def test_reads_its_weights_once_and_draws_no_random_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Lpips(net="alex", root=root)
    before = torch.random.get_rng_state()
    assert metric.available() is None
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("read twice"))
    assert metric(blobs(1, 32, 0), blobs(1, 32, 1)).shape == (1,)
    assert metric == Lpips(net="alex", root=root)


@pytest.mark.parametrize("net", NETS)
def test_without_weights_it_says_so_and_gives_no_score(net: Net, tmp_path: Path) -> None:
    metric = Lpips(net=net, root=tmp_path)
    reason = metric.available()
    assert reason is not None
    assert FILES[net] in reason
    assert str(tmp_path) in reason
    with pytest.raises(LpipsUnavailable, match=FILES[net]):
        metric(blobs(1, 32, 0), blobs(1, 32, 1))


@pytest.mark.parametrize("content", [b"", b"not weights at all", b"PK\x03\x04 cut short"])
def test_a_damaged_file_is_a_reason(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILES["alex"]).write_bytes(content)
    reason = Lpips(root=tmp_path).available()
    assert reason is not None
    assert "could not read" in reason
    assert "\n" not in reason


def test_other_weights_are_a_reason(tmp_path: Path) -> None:
    torch.save({"features.0.weight": torch.zeros(3, 3)}, tmp_path / FILES["alex"])
    assert "expected the convolutions of alex" in str(Lpips(root=tmp_path).available())
    torch.save([torch.zeros(1)], tmp_path / FILES["vgg"])
    assert "got a list" in str(Lpips(root=tmp_path, net="vgg").available())


def test_unknown_net_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected net 'alex' or 'vgg', got 'squeeze'"):
        Lpips(root=tmp_path, net="squeeze")  # type: ignore[arg-type]
