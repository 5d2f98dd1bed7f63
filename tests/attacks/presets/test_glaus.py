"""GLAUS against min-max sampling: the gradient is pieced together from many samples, and inverted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.tampered import scene
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.presets.glaus import Glaus, Magnitudes
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.protocols import ActiveAttack
from leaktight.core.threat import Knowledge
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Params, Update
from leaktight.data.embedded import Digits
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.metrics import psnr, ssim
from leaktight.models.initialise import build_model

QUERIES = 300


@pytest.fixture(scope="module")
def asked() -> tuple[Batch, list[Observation]]:
    """The truth, and what a server saw that asked one client again and again in ordinary rounds."""
    data = Digits(size=16).load(Path())
    model = build_model(MODELS["lenet_zhu"](), data.inputs, 10, init="wide", rng=replayed(1))
    place = scene(data, model, batch=1, examples=[5], defense=MinMaxSampling())
    return place.play(Glaus(queries=QUERIES))


def gradient(seen: Observation, truth: Batch) -> Params:
    return loss_and_gradient(Trainer(seen.model, LocalTraining()), seen.broadcast.params, {}, truth)[1]


def flat(tensors: Params) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def cosine(left: Params, right: Params) -> float:
    return float(torch.cosine_similarity(flat(left), flat(right), dim=0))


def test_every_query_is_another_sample_of_one_gradient(asked: tuple[Batch, list[Observation]]) -> None:
    truth, seen = asked
    assert len(seen) == QUERIES
    assert [each.broadcast.round for each in seen] == list(range(QUERIES))
    own = flat(gradient(seen[0], truth))
    supports = set()
    for each in seen[:20]:
        came = flat(each.update.tensors)
        assert float((came != 0).double().mean()) == pytest.approx(0.05, abs=1e-3)
        assert torch.equal(came[came != 0].sign(), own[came != 0].sign())
        supports.add(tuple(came.nonzero()[:, 0].tolist()))
    assert len(supports) == 20


@pytest.mark.parametrize("magnitudes", ["ranks", "odds", "values"])
def test_the_estimate_is_near_the_gradient_and_nearer_with_more_queries(
    asked: tuple[Batch, list[Observation]], magnitudes: Magnitudes
) -> None:
    truth, seen = asked
    own = gradient(seen[0], truth)
    attack = Glaus(magnitudes=magnitudes)
    few, many = (attack.estimate(part, rng=replayed(0)).update.tensors for part in (seen[:10], seen))
    assert cosine(many, own) > 0.95
    assert cosine(many, own) > cosine(few, own)


def test_an_update_that_is_not_sampled_is_taken_as_it_is(asked: tuple[Batch, list[Observation]]) -> None:
    truth, seen = asked
    own = gradient(seen[0], truth)
    plain = [replace(each, update=Update(own, "gradient", 1)) for each in seen[:3]]
    torch.testing.assert_close(flat(Glaus().estimate(plain, rng=replayed(0)).update.tensors), flat(own))


def test_the_mean_of_the_values_is_unbiased() -> None:
    """Two computations: the estimate, and numpy's mean of the same samples; both within three standard errors of g."""
    own = torch.linspace(-1, 1, 40, dtype=torch.float64)
    samples = [
        MinMaxSampling(keep_share=0.25).perturb({"w": own}, rng=replayed(number), report=lambda *_: None)["w"]
        for number in range(4000)
    ]
    mean = torch.stack(samples).mean(0)
    error = torch.stack(samples).std(0) / 4000**0.5
    assert float(((mean - own) / error).abs().max()) < 4


def test_the_image_is_found_where_one_sample_does_not_show_it(asked: tuple[Batch, list[Observation]]) -> None:
    truth, seen = asked
    alone = IdlgAttack(iterations=10, restarts=1).reconstruct(seen[:1], rng=replayed(2)).guess
    found = Glaus(iterations=10, restarts=1, magnitudes="odds").reconstruct(seen, rng=replayed(2))
    assert int(found.guess.targets) == int(truth.targets)
    similar = [float(ssim(guess.clamp(0, 1), truth.inputs)) for guess in (found.guess.inputs, alone.inputs)]
    assert similar[0] > 0.5 > similar[1]
    assert float(psnr(found.guess.inputs.clamp(0, 1), truth.inputs)) > 10
    assert f"the same examples behind all {QUERIES} answers" in found.notes["assumed"]
    assert any("colluding" in note for note in found.notes["assumed"])


def test_what_it_needs_is_named(asked: tuple[Batch, list[Observation]]) -> None:
    _, seen = asked
    assert isinstance(Glaus(), ActiveAttack)
    hidden = [replace(each, public_data=None) for each in seen[:3]]
    with pytest.raises(NotDisclosedError, match="public_data"):
        Glaus().estimate(hidden, rng=replayed(0))
    assert Knowledge.PUBLIC_DATA not in Glaus(magnitudes="values").requires
    Glaus(magnitudes="values").estimate(hidden, rng=replayed(0))
    other = replace(
        seen[1],
        broadcast=replace(seen[1].broadcast, params={n: t + 1 for n, t in seen[1].broadcast.params.items()}),
    )
    with pytest.raises(UsageError, match="the same model"):
        Glaus().estimate([seen[0], other], rng=replayed(0))
    broken = replace(seen[0], update=Update({n: t * torch.nan for n, t in seen[0].update.tensors.items()}, "gradient"))
    with pytest.raises(UsageError, match="finite update"):
        Glaus().estimate([broken], rng=replayed(0))
    with pytest.raises(UsageError, match="at least one"):
        Glaus().estimate([], rng=replayed(0))


@pytest.mark.parametrize("bad", [{"queries": 0}, {"colluders": 0}, {"magnitudes": "guess"}])
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Glaus(**bad)  # type: ignore[arg-type]
