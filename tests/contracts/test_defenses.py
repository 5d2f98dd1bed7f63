"""What every defense of the catalogue owes its users, whatever it does inside."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.config.catalogue import DEFENSES, MODELS
from leaktight.config.toml import kind_of
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.protocols import ClientFacts, Defense, Question, Report, RoundPlan, Step
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, cloned, digest, pack, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Params, State, Update
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.data.partition import Iid
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.client_dp import ClientDp
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
from leaktight.engines.inprocess import run
from leaktight.fl.accept import why_malformed
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.federation import assemble
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Train, encode
from leaktight.fl.plan import FederationPlan, Setup
from leaktight.fl.protocol import RoundOutcome
from leaktight.fl.state import ClientState, load_checkpoint, save_checkpoint
from leaktight.models.initialise import build_model
from leaktight.runtime.sharing import dumped, loaded


@dataclass(frozen=True)
class Case:
    """Example settings of a kind. weakest: those at which it does nothing, None where there are none.

    random: whether another seed gives another update from the same data and weights.
    """

    defense: Defense
    weakest: Defense | None
    random: bool = True


CASES: Mapping[str, Case] = {
    "noise": Case(AdditiveNoise(), AdditiveNoise(noise_std=0.0)),
    "clipping": Case(Clipping(clip_norm=0.01), Clipping(clip_norm=math.inf), random=False),
    "compression": Case(GradientCompression(), GradientCompression(prune_share=0.0), random=False),
    "minmax": Case(MinMaxSampling(), MinMaxSampling(keep_share=1.0)),
    "percentile_privacy": Case(
        PercentilePrivacy(percentile=50.0, gamma=1e-4), PercentilePrivacy(percentile=0.0, gamma=1e9), random=False
    ),
    "soteria": Case(Soteria(), Soteria(prune_share=0.0), random=False),
    "graddefense": Case(GradDefense(), GradDefense(noise_std=0.0)),
    "outpost": Case(Outpost(), Outpost(noise_scale=0.0, prune_share=0.0)),
    "dp_sgd": Case(DpSgd(), DpSgd(clip_norm=math.inf, noise_multiplier=0.0)),
    "fed_cdp": Case(FedCdp(), FedCdp(clip_norm=math.inf, noise_multiplier=0.0)),
    "client_dp": Case(ClientDp(), ClientDp(clip_norm=math.inf, noise_multiplier=0.0)),
    "adadefense": Case(AdaDefense(), None, random=False),
    "stack": Case(
        Stack(parts=(Clipping(clip_norm=0.1), AdditiveNoise())),
        Stack(parts=(Clipping(clip_norm=math.inf), AdditiveNoise(noise_std=0.0))),
    ),
    "lrp": Case(Lrp(), Lrp(spread=0.0)),
    "ada_lrp": Case(AdaLrp(), AdaLrp(spread=0.0)),
    "fedkl": Case(FedKl(key_length=16), None),
    "precode": Case(Precode(latent_size=4), None),
}
LOCAL = LocalTraining(epochs=3, batch_size=12, learning_rate=0.1)
"""Every batch is all of the client's examples, so that a seed changes nothing but what the defense draws."""

PAGE = Path(__file__).parents[2] / "docs" / "defenses.md"

every_kind = pytest.mark.parametrize("kind", CASES)


def test_every_defense_has_its_row() -> None:
    assert set(CASES) == set(DEFENSES) - {"none"}
    assert {kind: kind_of(case.defense) for kind, case in CASES.items()} == {kind: kind for kind in CASES}


@pytest.mark.parametrize("kind", DEFENSES)
def test_its_row_in_the_documentation_names_every_setting(kind: str) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind}` |")]
    assert len(rows) == 1
    assert {field.name for field in fields(DEFENSES[kind])} == set(re.findall("`(\\w+)`", rows[0].split("|")[3]))


@every_kind
def test_a_part_of_a_stack_is_named_as_its_kind(kind: str) -> None:
    assert list(Stack(parts=(CASES[kind].defense,)).named) == [kind]


def plain_network() -> nn.Module:
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def make_client(defense: Defense, name: str = "a", seed: int = 0, model: nn.Module | None = None) -> Client:
    generator = replayed(len(name)).child(name).public()
    images = torch.randint(256, (12, 3, 4, 4), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.arange(12) % 3)
    shared = defense.prepare(model or plain_network(), rng=replayed(1))
    return Client(name, examples, examples, Setup(Trainer(shared, LOCAL, defense=defense), FedAvg()), replayed(seed))


def request(client: Client, round_index: int = 0) -> Train:
    model = client.trainer.model
    broadcast = Broadcast(cloned(parameters_of(model)), cloned(buffers_of(model)), round_index)
    return Train(broadcast, LOCAL.learning_rate)


def trained(defense: Defense, seed: int = 0, **more: Any) -> ClientRound:
    client = make_client(defense, seed=seed, **more)
    return client.train_round(request(client), None)


def sent(done: ClientRound) -> dict[str, Tensor]:
    """Every tensor of an update."""
    return {**done.trained.update.tensors, **(done.trained.update.buffers or {})}


def alike(left: Params, right: Params) -> bool:
    """Equal but for rounding, in all names that both have."""
    common = left.keys() & right.keys()
    assert common
    return all(torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-6) for name in common)


@every_kind
def test_it_acts(kind: str) -> None:
    undefended, defended = trained(Defense()), trained(CASES[kind].defense)
    assert not alike(undefended.trained.update.tensors, defended.trained.update.tensors)


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.weakest is not None])
def test_at_strength_zero_it_does_nothing(kind: str) -> None:
    weakest = CASES[kind].weakest
    assert weakest is not None
    undefended, defended = trained(Defense()), trained(weakest)
    assert undefended.trained.update.tensors.keys() == defended.trained.update.tensors.keys()
    assert alike(sent(undefended), sent(defended))


@every_kind
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    first, again = (trained(CASES[kind].defense, seed=3) for _ in range(2))
    assert digest(sent(first)) == digest(sent(again))
    assert pack(first.state.stored()) == pack(again.state.stored())


@every_kind
def test_another_seed_changes_what_is_drawn_and_nothing_else(kind: str) -> None:
    case = CASES[kind]
    first, other = trained(case.defense, seed=3), trained(case.defense, seed=4)
    assert alike(first.trained.update.tensors, other.trained.update.tensors) is not case.random


@dataclass(frozen=True)
class Watched(Defense):
    """Lets another defense act and checks that it leaves alone all that it is given."""

    inner: Defense

    @staticmethod
    def _print(*values: Any) -> bytes:
        return pack({str(place): value for place, value in enumerate(values)})

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        return self.inner.prepare(model, rng=rng)

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return self.inner.start(model, facts, rng=rng)

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        before = self._print(state)
        result = self.inner.on_round(plan, state, rng=rng, report=report)
        assert self._print(state) == before
        return result

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        before = self._print(batch.inputs, batch.targets, state)
        result = self.inner.on_batch(batch, state, rng=rng, report=report)
        assert self._print(batch.inputs, batch.targets, state) == before
        return result

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        def look() -> bytes:
            own = {**parameters_of(step.model), **buffers_of(step.model)}
            given = (step.gradient, step.params, step.buffers, step.batch.inputs, step.batch.targets, state, own)
            return self._print(*given)

        before, training = look(), step.model.training
        result = self.inner.on_gradient(step, state, rng=rng, report=report)
        assert look() == before
        assert step.model.training == training
        return result

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        before = self._print(update.tensors, update.buffers, state)
        result = self.inner.on_update(update, state, rng=rng, report=report)
        assert self._print(update.tensors, update.buffers, state) == before
        return result


@every_kind
def test_inputs_are_not_changed(kind: str) -> None:
    defense = CASES[kind].defense
    client = make_client(Watched(defense))
    first = client.train_round(request(client), None)
    before = (
        pack(first.state.stored()),
        digest({"images": client.train.inputs}),
        digest(parameters_of(client.trainer.model)),
    )
    asked = request(client, 1)
    received = digest({**asked.broadcast.params, **asked.broadcast.buffers})
    client.train_round(asked, first.state)
    after = (
        pack(first.state.stored()),
        digest({"images": client.train.inputs}),
        digest(parameters_of(client.trainer.model)),
    )
    assert after == before
    assert digest({**asked.broadcast.params, **asked.broadcast.buffers}) == received
    change = cloned(first.trained.update.tensors)
    printed = digest(change)
    defense.on_aggregate(change, 2, {})
    assert digest(change) == printed


@every_kind
def test_clients_do_not_meet_in_the_defense(kind: str) -> None:
    defense = CASES[kind].defense
    ours, theirs = make_client(defense, "a"), make_client(defense, "b", seed=9)
    first = ours.train_round(request(ours), None)
    kept = pack(first.state.stored())
    expected = ours.train_round(request(ours, 1), first.state)
    other = theirs.train_round(request(theirs), None)
    theirs.train_round(request(theirs, 1), other.state)
    assert pack(first.state.stored()) == kept
    again = ours.train_round(request(ours, 1), first.state)
    assert digest(sent(again)) == digest(sent(expected))


@every_kind
def test_state_survives_checkpoints_and_the_way_to_a_worker(kind: str, tmp_path: Path) -> None:
    client = make_client(CASES[kind].defense)
    state = client.train_round(request(client), None).state
    expected = client.train_round(request(client, 1), state)
    save_checkpoint(tmp_path / "c", state.stored())
    for restored in (ClientState.restored(load_checkpoint(tmp_path / "c")), loaded(dumped(state))):
        done = client.train_round(request(client, 1), restored)
        assert digest(sent(done)) == digest(sent(expected))
        assert pack(done.state.stored()) == pack(expected.state.stored())


@every_kind
def test_an_update_holds_names_and_shapes_of_the_model_and_no_more(kind: str) -> None:
    client = make_client(CASES[kind].defense)
    asked = request(client)
    update = client.train_round(asked, None).trained.update
    assert why_malformed(update, asked.broadcast, "delta") is None
    assert update.tensors.keys() <= asked.broadcast.params.keys()
    assert (update.buffers or {}).keys() <= asked.broadcast.buffers.keys()


@every_kind
def test_figures_are_finite_numbers(kind: str) -> None:
    report = trained(CASES[kind].defense).report
    assert report["defense_seconds"] > 0
    for name, value in report.items():
        assert type(value) is float, name
        assert math.isfinite(value), name


@dataclass(frozen=True)
class Poisoned(Defense):
    """Puts one number that is not finite into the gradient before another defense sees it, and into one example's."""

    inner: Defense
    poison: float

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        return self.inner.prepare(model, rng=rng)

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return self.inner.start(model, facts, rng=rng)

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return self.inner.on_round(plan, state, rng=rng, report=report)

    def _spoil(self, gradients: Params) -> dict[str, Tensor]:
        result = cloned(gradients)
        result["0.weight"].view(-1)[0] = self.poison
        return result

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        spoilt = replace(step, gradient=self._spoil(step.gradient), per_example=lambda: self._spoil(step.per_example()))
        return self.inner.on_gradient(spoilt, state, rng=rng, report=report)

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        return self.inner.on_update(update, state, rng=rng, report=report)


@every_kind
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_never_sent(kind: str, poison: float) -> None:
    """The client declines, but for a defense that promises privacy: to decline would tell about the data."""
    defense = CASES[kind].defense
    if defense.private:
        update = trained(Poisoned(defense, poison)).trained.update
        assert all(bool(tensor.isfinite().all()) for tensor in update.tensors.values())
        return
    with pytest.raises(LeaktightError, match="not finite") as caught:
        trained(Poisoned(defense, poison))
    assert not isinstance(caught.value, UsageError), "one client's trouble must not end the run"


@pytest.fixture(scope="module")
def digits() -> Dataset:
    whole = Digits(size=16).load(Path())
    return replace(whole, train=whole.train.part(0, 60), test=whole.test.part(0, 40))


@every_kind
def test_a_federation_runs_with_it(kind: str, digits: Dataset) -> None:
    federation = assemble(
        digits,
        Iid(clients=3).split(digits, rng=replayed(0)),
        build_model(MODELS["lenet_zhu"](), digits.inputs, digits.num_classes, init="default", rng=replayed(0)),
        local=LocalTraining(samples=8, batch_size=4, learning_rate=0.05),
        aggregator=FedAvg(scheme="I"),
        plan=FederationPlan(rounds=2),
        defense=CASES[kind].defense,
        rng=replayed(5),
    )
    outcomes: list[RoundOutcome] = []
    final = run(federation, workers=1, after_round=lambda outcome, state: outcomes.append(outcome))
    assert [len(outcome.updates) for outcome in outcomes] == [3, 3]
    assert all(outcome.score is not None and math.isfinite(outcome.score.loss) for outcome in outcomes)
    assert set(final.clients) == set(federation.shares)
    assert digest(final.server.params) != digest(parameters_of(federation.trainer.model))
    assert all(bool(tensor.isfinite().all()) for tensor in final.server.params.values())


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in nested state that can be told from others: zeros, ones and the like are everywhere."""
    if isinstance(value, Tensor):
        yield from numbers_in(value.double().tolist())
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, float) and value != round(value, 3):
        yield value


def traces_of(numbers: Iterable[float], data: bytes) -> list[float]:
    """Which of the numbers occur in the bytes: in single or double precision and either sign, or as ten digits."""
    found = []
    for number in numbers:
        single = struct.unpack("<f", struct.pack("<f", number))[0]
        patterns = [struct.pack(form, sign * number) for form in ("<f", "<d", ">f", ">d") for sign in (1, -1)]
        digits = [repr(abs(each)).partition("e")[0].lstrip("0.")[:10].encode() for each in (number, single)]
        patterns += [each for each in digits if len(each) == 10]
        if any(pattern in data for pattern in patterns):
            found.append(number)
    return found


def everything_sent(client: Client) -> tuple[bytes, list[ClientRound]]:
    """All bytes that leave a client in two rounds: updates and figures."""
    first = client.train_round(request(client), None)
    second = client.train_round(request(client, 1), first.state)
    return encode({"first": first.trained, "second": second.trained}), [first, second]


def fedkl_key(rounds: list[ClientRound]) -> list[float]:
    return [
        number
        for done in rounds
        for part in (done.state.params, done.state.buffers)
        for name, tensor in part.items()
        if "lock" in name
        for number in numbers_in(tensor)
    ]


def adadefense_moments(rounds: list[ClientRound]) -> list[float]:
    return [number for done in rounds for number in numbers_in(done.state.defense)]


def lrp_rates(rounds: list[ClientRound]) -> list[float]:
    return [rate for done in rounds for rate in numbers_in(done.truth().learning_rates)]


@pytest.mark.parametrize(
    ("defense", "secrets", "at_least"),
    [
        pytest.param(FedKl(key_length=64), fedkl_key, 2 * (64 + 2 * 64 * 4), id="fedkl"),
        pytest.param(FedKl(key_length=64, variant="code"), fedkl_key, 2 * (64 + 2 * 64 * 4), id="fedkl-code"),
        pytest.param(AdaDefense(), adadefense_moments, 2 * 100, id="adadefense"),
        pytest.param(AdaDefense(form="yogi", variant="code"), adadefense_moments, 2 * 100, id="adadefense-yogi-code"),
        pytest.param(Lrp(), lrp_rates, 6, id="lrp"),
        pytest.param(AdaLrp(), lrp_rates, 6, id="ada_lrp"),
        pytest.param(Stack(parts=(Lrp(), AdditiveNoise())), lrp_rates, 6, id="lrp-in-a-stack"),
    ],
)
def test_no_byte_of_a_secret_leaves_the_client(
    defense: Defense, secrets: Callable[[list[ClientRound]], list[float]], at_least: int
) -> None:
    data, rounds = everything_sent(make_client(defense))
    private = secrets(rounds)
    assert len(private) >= at_least
    assert traces_of(private, data) == []
    # The search does find what is there: the update's own numbers, and the secrets in the state and the truth.
    shown = [number for done in rounds for number in numbers_in(done.trained.update.tensors)]
    assert shown
    assert traces_of(shown, data) == shown
    kept = encode({"states": [done.state.stored() for done in rounds], "rates": lrp_rates(rounds)})
    assert traces_of(private, kept) == private


@every_kind
def test_an_unknown_question_is_refused(kind: str) -> None:
    defense, facts = CASES[kind].defense, ClientFacts("a", 12, 3)
    _, state = defense.start(defense.prepare(plain_network(), rng=replayed(1)), facts, rng=replayed(0))
    with pytest.raises(ValueError, match="answer to 'secrets'"):
        defense.answer(Question("secrets", {}), state, facts, rng=replayed(0))


class Shifted(nn.Module):
    """Adds the sum of a parameter of any shape: one number, or 0 where the parameter has no elements."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full(shape, 0.3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.shift.sum().to(inputs.dtype)


class Cast(nn.Module):
    """Goes on in another type, as a network in half precision does with images."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


def odd_network(
    shape: tuple[int, ...] = (2,), *, dtype: torch.dtype = torch.float32, last: torch.dtype | None = None
) -> nn.Module:
    """A network with a parameter of this shape, in this type but for its last layer."""
    last = last or dtype
    with global_seed(replayed(0)):
        first = nn.Sequential(nn.Conv2d(3, 4, 3), Shifted(shape), nn.Sigmoid(), nn.Flatten()).to(dtype)
        return nn.Sequential(Cast(dtype), *first, Cast(last), nn.Linear(16, 3).to(last))


ODD_NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "no_dimensions": lambda: odd_network(()),
    "one_number": lambda: odd_network((1,)),
    "no_numbers": lambda: odd_network((0, 3)),
    "bfloat16": lambda: odd_network((), dtype=torch.bfloat16),
    "float16": lambda: odd_network((), dtype=torch.float16),
    "float64": lambda: odd_network((), dtype=torch.float64),
    "mixed": lambda: odd_network((1,), dtype=torch.bfloat16, last=torch.float64),
}

ODD_SETTINGS: Mapping[str, Defense] = {
    **{kind: case.defense for kind, case in CASES.items()},
    "noise-laplace-update": AdditiveNoise(distribution="laplace", at="update"),
    "clipping-layer": Clipping(scope="layer", clip_norm=0.01),
    "clipping-example": Clipping(scope="example", clip_norm=0.01),
    "compression-global": GradientCompression(scope="global"),
    "compression-update": GradientCompression(at="update"),
    "minmax-step": MinMaxSampling(at="step", keep_share=0.5),
    "graddefense-clip": GradDefense(clip=True, refresh="step", compensation_scale=0.1),
    "graddefense-code": GradDefense(compensation_scale=0.1, variant="code"),
    "outpost-element": Outpost(fisher="element", decay=0.0),
    "outpost-code": Outpost(variant="code", decay=0.0),
    "fed_cdp-module": FedCdp(layers="module", final_clip_norm=1.0),
    "adadefense-adagrad": AdaDefense(form="adagrad"),
    "adadefense-yogi-code": AdaDefense(form="yogi", variant="code"),
    "adadefense-inside": AdaDefense(epsilon_inside=True),
    "fedkl-code": FedKl(key_length=16, variant="code"),
}
"""Every kind, and the settings that take another way through it."""


@pytest.mark.parametrize("settings", ODD_SETTINGS)
@pytest.mark.parametrize("network", ODD_NETWORKS)
def test_it_acts_on_parameters_of_any_shape_and_type_and_keeps_both(network: str, settings: str) -> None:
    defense = ODD_SETTINGS[settings]
    client, plain = (make_client(each, model=ODD_NETWORKS[network]()) for each in (defense, Defense()))
    state = None
    for round_index in range(2):
        asked = request(client, round_index)
        done = client.train_round(asked, state)
        state, update = done.state, done.trained.update
        assert why_malformed(update, asked.broadcast, "delta") is None
        change, _ = defense.on_aggregate(update.tensors, 2, {})
        for tensors in (update.tensors, change):
            for name, tensor in tensors.items():
                expected = asked.broadcast.params[name]
                assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), name
                assert bool(tensor.isfinite().all()), name
        assert digest(sent(done)) != digest(sent(plain.train_round(request(plain, round_index), None)))
        assert all(math.isfinite(value) for value in done.report.values())
