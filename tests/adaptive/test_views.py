"""Masks, inversions and models of defenses against closed forms, and against what a real client did."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adaptive.scenes import LOCAL, Scene, digits, play
from tests.seeds import replayed
from torch import Tensor

from leaktight.adaptive.fedkl import KnowsFedKl
from leaktight.adaptive.graddefense import fitness
from leaktight.adaptive.knowing import Expecting
from leaktight.adaptive.noise import averaged, of_steps, prior_weight
from leaktight.adaptive.outpost import KnowsOutpost
from leaktight.adaptive.pruning import PrunedAlike
from leaktight.adaptive.sampling import mean_size, solutions
from leaktight.adaptive.stages import update_of
from leaktight.adaptive.table import KnowsStack, adaptation_to
from leaktight.attacks.matching.view import Simulation, View
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.protocols import ClientFacts, Defense
from leaktight.core.training import LocalTraining
from leaktight.core.types import Params
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.percentile_privacy import PercentilePrivacy
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack
from leaktight.models.keylock import KeyLock
from leaktight.models.small import FeedForward


def view_of(scene: Scene) -> View:
    """An update as the attacker who knows the defense matches it."""
    defense = scene.seen.defense
    assert isinstance(defense, Defense)
    adaptation = adaptation_to(defense)
    assert adaptation is not None
    _, (shown,) = adaptation.prepare(CsDlg().matching(), [scene.seen])
    count = scene.seen.batch_size or 0
    expecting = Expecting(inner=Simulation(), adaptation=adaptation)
    return expecting.view(shown, count, torch.float64, needs_scale=False)


def explained(scene: Scene, unknowns: Params | None = None, order: list[int] | None = None) -> float:
    """1 - cosine between the update and what the attacker's model of the client makes of the truth."""
    view = view_of(scene)
    order = order or list(range(len(scene.truth)))
    images, labels = scene.truth.inputs[order].double(), scene.truth.targets[order]
    guess = view.guess(images, labels, view.params, view.buffers, {**view.starts, **(unknowns or {})})
    return 1 - cosine(view.weighted(guess, view.weights), view.weighted(view.target, view.weights))


def cosine(one: Params, other: Params) -> float:
    left, right = (flat({name: tensors[name] for name in other}) for tensors in (one, other))
    return float(left @ right / (left.norm() * right.norm()))


def flat(tensors: Params) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


CLIPPED: dict[str, tuple[Defense, dict[str, object]]] = {
    "layer": (Clipping(clip_norm=0.1, scope="layer"), {}),
    "layer-update": (Clipping(clip_norm=0.01, scope="layer", at="update"), {"kind": "delta"}),
    "global-steps": (Clipping(clip_norm=0.3), {"kind": "delta", "local": replace(LOCAL, steps=3)}),
    "examples": (Clipping(clip_norm=0.5, scope="example"), {"count": 3, "local": replace(LOCAL, batch_size=3)}),
    "dp_sgd": (DpSgd(clip_norm=0.5, noise_multiplier=0.0), {"count": 3, "local": replace(LOCAL, batch_size=3)}),
    "fed_cdp": (FedCdp(clip_norm=0.2, final_clip_norm=0.1, decay_rounds=2, noise_multiplier=0.0), {"round_index": 1}),
    "fed_cdp-modules": (FedCdp(clip_norm=0.1, layers="module", noise_multiplier=0.0), {}),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_the_truth_clipped_alike_is_what_was_sent(name: str) -> None:
    defense, options = CLIPPED[name]
    scene = play(defense, **options)  # type: ignore[arg-type]
    assert explained(scene) < 1e-7
    plain = replace(scene.seen, defense=Defense())
    view = Simulation().view(plain, len(scene.truth), torch.float64, needs_scale=False)
    unaware = view.guess(scene.truth.inputs.double(), scene.truth.targets, view.params, view.buffers)
    assert 1 - cosine(unaware, view.target) > 1e-4, "without clipping the truth does not explain it"


def test_the_true_rates_explain_an_lrp_update() -> None:
    scene = play(Lrp(), kind="delta", local=replace(LOCAL, steps=4))
    rates = torch.tensor(scene.learning_rates, dtype=torch.float64).log()
    assert explained(scene, {"lrp.log_rates": rates - math.log(LOCAL.learning_rate)}) < 1e-9
    assert explained(scene) > 1e-5
    assert not view_of(play(Lrp(), kind="delta")).unknowns, "with one step only the length is unknown"


def locks_of(scene: Scene, defense: FedKl) -> tuple[Params, Tensor]:
    """The scales and shifts of a client's new locks, by the names of the attacker's unknowns, and the client's key."""
    facts = ClientFacts("a", 1, 1)
    model, _ = defense.start(copy.deepcopy(scene.seen.model), facts, rng=replayed(0).child("defense", "start"))
    locks = {name: lock for name, lock in model.named_modules() if isinstance(lock, KeyLock)}
    truth = {
        f"{name}.{part}": value.detach().double()
        for name, lock in locks.items()
        for part, value in zip(("scale", "shift"), lock.coefficients(), strict=True)
    }
    return truth, next(iter(locks.values())).key.double()


@pytest.mark.parametrize("blocks", ["first", "all"])
def test_the_true_scales_and_shifts_explain_a_fedkl_update(blocks: Literal["first", "all"]) -> None:
    defense = FedKl(key_length=16, blocks=blocks)
    scene = play(defense)
    truth, _ = locks_of(scene, defense)
    view = view_of(scene)
    assert set(view.unknowns) == set(truth)
    assert explained(scene, truth) < 1e-6
    assert "features.0.weight" in view.target
    assert "features.0.bias" not in view.target, "the norm cancels it, so that its gradient is rounding"


@pytest.mark.parametrize("key_length", [16, 1024])
def test_the_true_locks_and_the_length_of_the_key_explain_several_steps_of_fedkl(key_length: int) -> None:
    """The locks move with every step, momentum and weight decay included, and so do their scales and shifts."""
    defense = FedKl(key_length=key_length)
    local = replace(LOCAL, steps=4, momentum=0.9, weight_decay=0.01)
    scene = play(defense, kind="delta", local=local)
    truth, key = locks_of(scene, defense)
    pull = ((key.square().sum() + 1) / (key_length / 3 + 1)).log()
    assert float(pull.abs()) < 5 * key_length**-0.5, "it is nearly known from the length of the key"
    assert set(view_of(scene).unknowns) == {*truth, "fedkl.log_pull"}
    moving, staying = (explained(scene, {**truth, "fedkl.log_pull": each}) for each in (pull, pull - 50))
    assert moving < 1e-8
    assert staying > 100 * moving, "locks that stay do not explain it"


@pytest.mark.parametrize(
    ("defense", "local"),
    [
        (FedKl(key_length=16), replace(LOCAL, steps=3, optimizer="adam")),
        (FedKl(key_length=16, variant="code"), replace(LOCAL, steps=3)),
        (Stack(parts=(Clipping(clip_norm=0.3), FedKl(key_length=16))), replace(LOCAL, steps=3)),
        (Stack(parts=(FedKl(key_length=16), Clipping(clip_norm=0.3, scope="layer"))), replace(LOCAL, steps=3)),
    ],
    ids=["adam", "code", "clipped", "clipped-layers"],
)
def test_locks_whose_steps_are_others_count_as_constant(defense: Defense, local: LocalTraining) -> None:
    scene = play(defense, kind="delta", local=local)
    view = view_of(scene)
    assert not view.trained
    assert len(view.unknowns) == 2, "scale and shift"
    assert 0 < explained(scene) < 1, "what it expects can be computed"


def test_a_search_for_locks_begins_as_often_after_several_steps() -> None:
    scene = play(FedKl(key_length=16), kind="delta", local=replace(LOCAL, steps=3))
    for attack in (InvertingGradients(), CsDlg()):
        prepared, _ = KnowsFedKl(defense=FedKl(key_length=16)).prepare(attack.matching(), [scene.seen])
        assert prepared.restarts == 8
        assert prepared.stop_below is not None


@pytest.mark.parametrize("count", [1, 4])
def test_a_solved_bottleneck_gives_the_features_of_every_example(count: int) -> None:
    """Against the features that the network computes from the truth."""
    scene = play(Precode(), count=count, local=replace(LOCAL, batch_size=count))
    view = view_of(scene)
    assert not view.unknowns
    model = scene.seen.model
    assert isinstance(model, FeedForward)
    with torch.no_grad():
        features = model.features(model.normalize(scene.truth.inputs)).flatten(1).double()
    rows = view.target["classifier.linear.weight"][:count]
    assert float(torch.cdist(features, rows).min(1).values.max()) < 1e-4
    order = scene.truth.targets.argsort(stable=True).tolist()
    assert explained(scene, order=order) < 1e-9, "the truth explains the update of the layers before it"


def test_a_bottleneck_behind_noise_is_not_taken_for_solved() -> None:
    scene = play(Precode(latent_size=8))
    blurred = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in scene.seen.update.tensors.items()}
    seen = replace(scene.seen, update=replace(scene.seen.update, tensors=blurred))
    view = view_of(replace(scene, seen=seen))
    assert view.unknowns
    assert not any("bottleneck" in each for each in view.target)


def test_solutions_of_a_sample_hold_the_truth() -> None:
    defense = MinMaxSampling(keep_share=0.2)
    truth, sent = play(Defense()).seen.update.tensors, play(defense).seen.update.tensors
    for name, each in solutions(sent).items():
        drawn = sent[name] != 0
        off = torch.minimum((each.small - truth[name]).abs(), (each.large - truth[name]).abs())[drawn]
        assert float((off / truth[name][drawn].abs()).max() if len(off) else 0.0) < 0.05, name
        product = (each.small * each.large)[drawn]
        torch.testing.assert_close((each.small + each.large)[drawn], sent[name][drawn].double(), rtol=1e-6, atol=1e-9)
        assert float(product.std() if len(product) > 1 else 0.0) < 1e-9, "both have the same product, C"


@given(size=st.floats(0.05, 20.0))
@settings(max_examples=20, deadline=None)
def test_the_mean_size_is_the_inverse_of_the_share_drawn(size: float) -> None:
    values = torch.empty(200_000, dtype=torch.float64).exponential_(generator=replayed(0).public()) * size
    share = float((values.square() / (values.square() + 1)).mean())
    assert mean_size(share) == pytest.approx(size, rel=0.05)


def test_what_is_matched_behind_compression_is_exact() -> None:
    truth, view = play(Defense()).seen.update.tensors, view_of(play(GradientCompression()))
    for name, weight in view.weights.items():
        assert weight.unique().tolist() == [0.0, 1.0]
        assert torch.equal(view.target[name] * weight, truth[name].double() * weight)


def test_what_counts_fully_behind_outpost_is_exact() -> None:
    defense = Outpost()
    truth, scene = play(Defense()).seen.update.tensors, play(defense)
    view = view_of(scene)
    full = {name: weight >= (1 - 1e-6) * weight.max() for name, weight in view.weights.items()}
    full = {name: mask for name, mask in full.items() if bool((view.target[name] == 0).any())}
    assert sum(int(mask.sum()) for mask in full.values()) > 300
    for name, mask in full.items():
        assert torch.equal(view.target[name][mask], truth[name].double()[mask])
        noisy = view.weights[name][(view.weights[name] > 0) & ~mask]
        assert len(noisy)
        assert float(noisy.max()) < 0.01 * float(view.weights[name].max())


def test_a_zero_that_rounding_left_makes_no_column_behind_outpost_clean() -> None:
    """A parameter of float32 does not change by noise below half of its last bit."""
    defense = Outpost()
    scene = play(defense, kind="delta")
    name = "classifier.weight"
    update = scene.seen.update.tensors[name].clone()
    noisy = int((update != 0).all(0).nonzero()[0])
    update[3, noisy] = 0
    seen = replace(scene.seen, update=replace(scene.seen.update, tensors={**scene.seen.update.tensors, name: update}))
    errors = KnowsOutpost(defense=defense).errors(seen)[name]
    assert float(errors[:, noisy].min()) > 100 * float(errors.min())


def test_an_update_that_outpost_left_alone_is_matched_as_it_is() -> None:
    scene = play(Defense())
    view = view_of(replace(scene, seen=replace(scene.seen, defense=Outpost())))
    assert not view.weights


def test_soterias_zero_columns_are_left_out() -> None:
    scene = play(Soteria())
    view = view_of(scene)
    weight = scene.seen.update.tensors["classifier.weight"]
    assert torch.equal(view.weights["classifier.weight"] == 0, (weight == 0).all(0).expand_as(weight))
    assert list(view.weights) == ["classifier.weight"]


@pytest.mark.parametrize(("defense", "layer"), [(GradientCompression(), ""), (Soteria(), "classifier.weight")])
def test_the_true_examples_explain_steps_that_were_pruned_alike(defense: Defense, layer: str) -> None:
    scene = play(defense, kind="delta", local=replace(LOCAL, steps=3))
    plain = CsDlg().matching().view(scene.seen)
    view = PrunedAlike(defense, layer).after(plain, scene.truth)
    assert relative(update_of(view, scene.truth), view.target) < 1e-5
    assert relative(update_of(plain, scene.truth), plain.target) > 1e-2, "they do not if nothing is pruned"


def test_the_true_examples_fit_every_bound_of_percentile_privacy() -> None:
    scene = play(PercentilePrivacy(), kind="delta", local=replace(LOCAL, steps=2))
    view = view_of(scene)
    assert relative(update_of(view, scene.truth), view.target) < 1e-4
    plain = CsDlg().matching().view(scene.seen)
    assert relative(update_of(plain, scene.truth), plain.target) > 1e-2, "entries were cut"


def relative(tensors: Params, target: Params) -> float:
    off = torch.stack([(tensors[name] - tensor).square().sum() for name, tensor in target.items()]).sum()
    return float((off / torch.stack([tensor.square().sum() for tensor in target.values()]).sum()).sqrt())


def test_runs_that_fit_count_and_runs_of_noise_do_not() -> None:
    noise = torch.zeros(3000, dtype=torch.float64)
    noise[1000:2000] = torch.randn(1000, generator=replayed(0).public()).double()
    rest = 1e-3 * torch.randn(3000, generator=replayed(1).public()).double()
    weights = flat(fitness({"a": (noise + rest)[:1500], "b": (noise + rest)[1500:]}, 32, 0.25))
    assert float(weights[1050:1950].max()) < 0.01
    assert float(weights[:950].min()) > 0.4
    assert float(weights[2050:].min()) > 0.4


def test_updates_of_the_same_weights_are_averaged_and_no_others() -> None:
    defense = AdditiveNoise(noise_std=0.1)
    one, two = play(defense, noise_seed=1).seen, play(defense, noise_seed=2).seen
    moved = {name: tensor + 1 for name, tensor in one.broadcast.params.items()}
    other = replace(two, broadcast=replace(two.broadcast, params=moved))
    (mean,) = averaged([one, two])
    assert [len(averaged(each)) for each in ([one], [one, other], [one, two, other])] == [1, 2, 2]
    for name, tensor in mean.update.tensors.items():
        torch.testing.assert_close(tensor, (one.update.tensors[name] + two.update.tensors[name]) / 2)


def test_the_weight_of_the_prior_in_closed_form() -> None:
    seen = play(Defense(), kind="delta", local=replace(LOCAL, steps=4)).seen
    assert of_steps(0.5, seen) == pytest.approx(LOCAL.learning_rate * 0.5 * 2)
    assert of_steps(0.5, replace(seen, local_training=replace(LOCAL, momentum=0.9))) is None
    unit = {name: torch.full_like(tensor, 2.0) for name, tensor in seen.update.tensors.items()}
    seen = replace(seen, update=replace(seen.update, tensors=unit))
    size = sum(tensor.numel() for tensor in unit.values())
    # |u|^2 = 4 P, |g|^2 = 4 P - P s^2
    expected = 0.25 * digits().inputs.size / (math.sqrt(4 * (4 - 0.25)) * size * 0.2)
    assert prior_weight(seen, 0.5, 0.2) == pytest.approx(expected)


def test_a_stack_keeps_what_can_still_be_read() -> None:
    clip, prune, blur = Clipping(), GradientCompression(), AdditiveNoise()
    kinds = {
        (clip, prune): ["KnowsClipping", "KnowsSupport"],
        (prune, blur): ["KnowsNoise"],
        (blur, prune): ["KnowsNoise", "KnowsSupport"],
        (GradDefense(), blur): ["KnowsNoise"],
        (prune, AdaDefense()): ["KnowsSupport", "KnowsAdaDefense"],
    }
    for parts, expected in kinds.items():
        made = adaptation_to(Stack(parts=parts))
        assert isinstance(made, KnowsStack)
        assert [type(part).__name__ for part in made.parts] == expected
    assert adaptation_to(Stack(parts=(Defense(),))) is None


def test_every_example_of_a_batch_has_noise_of_its_own() -> None:
    scene = play(Precode(latent_size=8), count=8, local=replace(LOCAL, batch_size=8))  # too many to be solved
    (unknown,) = view_of(scene).unknowns.values()
    assert tuple(unknown.start.shape) == (8, 8)
