"""Under a defense that promises privacy nothing exact leaves, whether or not there is an answer tells nothing, and no
noise meets two different inputs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.defenses.dp_scenes import client_of, small_network
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.errors import OutsideBudgetError, RefusedError, UsageError
from leaktight.core.protocols import Defense, Guard, Sight
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Params, State, Update
from leaktight.defenses import wrap
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack
from leaktight.defenses.wrap import Defended
from leaktight.engines.inprocess import ClientJob, answered
from leaktight.fl.client import Client
from leaktight.fl.consent import Agreement
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.messages import Declined, Train

pytest.importorskip("opacus")

LOUD = ClientDp(noise_multiplier=5.0)


def asked(model: nn.Module, number: int = 0, params: Params | None = None) -> Train:
    return Train(Broadcast(params or parameters_of(model), buffers_of(model), number), 0.1)


def overflowing(model: nn.Module) -> Train:
    return asked(model, params={name: torch.full_like(each, 3e38) for name, each in parameters_of(model).items()})


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def alike(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


# --- whether there is an answer -------------------------------------------------------------------------------------

FIRST: Mapping[str, Defense] = {
    "clipping": Clipping(),
    "clipping at the update": Clipping(at="update"),
    "clipping by example": Clipping(scope="example"),
    "outpost": Outpost(),
    "soteria": Soteria(),
    "noise": AdditiveNoise(),
    "compression": GradientCompression(),
    "graddefense": GradDefense(),
    "minmax": MinMaxSampling(),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_stack_that_ends_in_privacy_answers_whatever_happens_before(name: str) -> None:
    model = small_network().float()
    done = client_of(Stack(parts=(FIRST[name], LOUD)), model).train_round(overflowing(model), None)
    sent = flat(done.trained.update.tensors)
    assert bool(sent.isfinite().all())
    assert 3 < float(sent.std()) < 7, "noise, and nothing else"


class Curious(Guard):
    """Keeps what it is shown."""

    shown: Batch | None = None

    def admit(self, broadcast: Broadcast, model: nn.Module, sight: Sight | None, state: State, *, report: Any) -> State:
        self.shown = None if sight is None else sight.examples
        return state

    def after(self, update: Update, broadcast: Broadcast, state: State) -> State:
        return state


@pytest.mark.parametrize(("defense", "sees"), [(LOUD, False), (DpSgd(), False), (AdditiveNoise(), True)])
def test_a_guard_beside_a_promise_decides_without_the_images(defense: Defense, sees: bool) -> None:
    model, guard = small_network().float(), Curious()
    replace(client_of(defense, model), guard=guard).train_round(asked(model), None)
    assert (guard.shown is not None) == sees


class Failing(Defense):
    """Fails on its data in every round."""

    def on_gradient(self, step: Any, state: State, **more: Any) -> Any:
        raise RefusedError("this example")


def test_a_request_that_failed_cannot_be_asked_again() -> None:
    model = small_network().float()
    client = client_of(Failing(), model)
    done = answered(client, ClientJob(client.name, asked(model), None, record=False))
    assert done.reply == Declined()
    with pytest.raises(RefusedError, match="asked for round 1 after round 1"):
        client.train_round(asked(model), done.state)


# --- what is exact --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Remembers exact sums over what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.total: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += inputs.sum()
        return inputs


def remembering() -> nn.Module:
    with global_seed(replayed(0)):
        norm = nn.InstanceNorm2d(4, track_running_stats=True)
        return nn.Sequential(nn.Conv2d(1, 4, 3), norm, Counting(), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 3))


def test_no_statistic_leaves_a_private_client() -> None:
    model = remembering()
    sent = client_of(LOUD, model).train_round(asked(model), None).trained.update
    assert sent.buffers is None
    open_ = client_of(AdditiveNoise(), model).train_round(asked(model), None).trained.update
    assert float((open_.buffers or {})["2.total"]) != 0, "where nothing is promised, they do"


def own_round(defended: Defended, examples: Examples) -> Update:
    batch = examples.batch(slice(0, 8))
    defended.start_round(0.1, 1)
    defended.loss(defended.model(batch.inputs), batch.targets).backward()
    defended.protect(batch.inputs, batch.targets)
    return defended.finish_round()


def wrapped(defense: Defense, model: nn.Module, **more: Any) -> Defended:
    return wrap(defense, model, num_examples=40, num_classes=3, **more)


def test_nor_a_loop_of_ones_own() -> None:
    model = remembering()
    assert own_round(wrapped(LOUD, model), client_of(LOUD, model).train).buffers is None


def test_a_client_made_by_hand_has_no_way_round_its_budget() -> None:
    model = small_network().float()
    client = client_of(DpSgd(), model)
    for changes in (
        {"setup": replace(client.setup, aggregator=FedBoosting())},
        {"agreement": Agreement(scores_on="validation")},
    ):
        with pytest.raises(OutsideBudgetError, match="does not count"):
            replace(client, **changes)


# --- noise that comes twice -----------------------------------------------------------------------------------------


def altered(client: Client, **changes: Any) -> Client:
    """The client with other settings of its training, the same network included."""
    return replace(client, setup=replace(client.setup, trainer=replace(client.trainer, **changes)))


def noise_of(client: Client, model: nn.Module) -> Tensor:
    """What is in the update beside the clipped update itself, by the scale of its noise."""
    defense: Any = client.trainer.defense
    still = altered(client, defense=replace(defense, noise_multiplier=0.0))
    sent, plain = (flat(each.train_round(asked(model), None).trained.update.tensors) for each in (client, still))
    return sent - plain


def test_other_data_or_settings_under_one_key_meet_other_noise() -> None:
    """A node that is restarted with twice the noise would otherwise send what gives the update: 2 a - b."""
    model = small_network().float()
    client = client_of(LOUD, model)
    first = noise_of(client, model)
    changed = {
        "noise": altered(client, defense=ClientDp(noise_multiplier=10.0)),
        "clip": altered(client, defense=replace(LOUD, clip_norm=0.5)),
        "data": replace(client, train=client.train.part(0, 39)),
        "name": replace(client, name="b"),
        "training": altered(client, local=LocalTraining(epochs=1, batch_size=12)),
    }
    assert alike(first, noise_of(client, model)) == pytest.approx(1)
    for name, other in changed.items():
        assert abs(alike(first, noise_of(other, model))) < 0.5, name


def test_copies_and_namesakes_of_a_wrapped_client_draw_for_themselves() -> None:
    model, rng = small_network().float(), replayed(3)
    examples = client_of(LOUD, model).train
    original = wrapped(LOUD, model, rng=rng)
    several = [copy.deepcopy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original)), original]
    several += [wrapped(LOUD, model, rng=rng, client=name) for name in ("ann", "bob")]
    assert rng.key is not None
    assert rng.key not in pickle.dumps(original)
    noises = [flat(own_round(each, examples).tensors) for each in several]
    for place, one in enumerate(noises):
        for other in noises[place + 1 :]:
            assert abs(alike(one, other)) < 0.5


def test_a_round_begun_anew_draws_anew() -> None:
    model = small_network().float()
    defended, examples = wrapped(AdditiveNoise(noise_std=5.0), model, rng=replayed(3)), client_of(LOUD, model).train
    batch = examples.batch(slice(0, 8))
    noisy = []
    for _ in range(2):
        defended.model.zero_grad()
        defended.start_round(0.1, 1)
        defended.loss(defended.model(batch.inputs), batch.targets).backward()
        defended.protect(batch.inputs, batch.targets)
        noisy.append(torch.cat([each.grad.flatten() for each in defended.model.parameters() if each.grad is not None]))
        defended.abandon_round()
    assert abs(alike(*noisy)) < 0.5


@pytest.mark.parametrize("steps_per_epoch", [0, -1, float("inf"), 2.5, True])
def test_an_epoch_is_a_whole_number_of_steps(steps_per_epoch: Any) -> None:
    with pytest.raises(UsageError, match="expected steps_per_epoch as a whole number >= 1"):
        wrapped(DpSgd(), small_network().float()).start_round(0.1, 3, steps_per_epoch=steps_per_epoch)


def test_a_key_of_its_own_for_everybody() -> None:
    """Who holds a client's key, or the server's, can compute nobody else's secrets."""
    root = Rng.fresh()
    places = (root, root.child("server").apart(), *(root.child("client", name).apart() for name in ("a", "b")))
    assert len({place.key for place in places}) == 4
