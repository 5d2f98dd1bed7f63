"""A server that goes back to an earlier round: honest ones end in the right model, others gain nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.engines.flower.grids import Change, LocalGrid
from tests.engines.flower.test_memory import CLIENT, ask, raw, score, sent_bytes, train, trained  # noqa: F401
from tests.engines.flower.test_play import grid_for, whole, with_update
from torch import Tensor

from leaktight.core.errors import RoundFailedError
from leaktight.core.privacy import Spent
from leaktight.core.protocols import Report
from leaktight.core.rng import Rng
from leaktight.core.types import State, Update
from leaktight.crypto.paillier import Paillier
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.engines.flower.server import play
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.consent import Consent
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.messages import Declined, Evaluated, Outcome, Trained
from leaktight.fl.plan import FederationPlan

from flwr.app import Message  # isort: skip

MakeFederation = Callable[..., Federation]


@dataclass(frozen=True)
class Counts(AdditiveNoise):
    """Counts its rounds as a budget."""

    @property
    def private(self) -> bool:
        return True

    def spent(self, state: State) -> Spent:
        return Spent(float(state["rounds"]), 1e-5)

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        update, state = super().on_update(update, state, rng=rng, report=report)
        return update, {**state, "rounds": state.get("rounds", 0) + 1}


def made(make_federation: MakeFederation, repeats: int = 0, **settings: object) -> Federation:
    federation = make_federation(
        **{"clients": 2, "plan": FederationPlan(rounds=4), "defense": AdditiveNoise(noise_std=0.1), **settings}
    )
    return replace(federation, consent=replace(federation.consent, max_repeats=repeats))


def played(federation: Federation, folder: Path, change: Change, **options: object) -> list[FederationState]:
    """The states after all rounds that were played by a new server with new nodes."""
    states: list[FederationState] = []
    grid = grid_for(federation, state_dir=folder, change=change)
    play(grid, federation, run="a", after_round=lambda _, now: states.append(now), **options)  # type: ignore[arg-type]
    return states


def honest(sent: Message, reply: Message) -> Message:
    return reply


@pytest.mark.parametrize("kind", ["noise", "adadefense", "lrp", "fedkl", "encrypted"])
def test_a_server_that_goes_back_gets_the_same_bytes_and_ends_in_the_same_model(
    make_federation: MakeFederation,
    tmp_path: Path,
    kind: str,
    trained: list[str],  # noqa: F811
) -> None:
    defense = {"adadefense": AdaDefense(), "lrp": Lrp(), "fedkl": FedKl(key_length=8)}.get(kind, AdditiveNoise())
    sealed = Encrypted(of=FedAvg(), cipher=Paillier(key_bits=256, unsafe_small=True, bound=8.0))
    aggregator = sealed if kind == "encrypted" else FedAvg(scheme="I")
    federation = made(make_federation, defense=defense, aggregator=aggregator)
    states = played(federation, tmp_path, honest)
    before = len(trained)
    for number in (1, 2, 3):
        again = played(federation, tmp_path, honest, state=states[number - 1])
        assert [whole(each) for each in again] == [whole(each) for each in states[number:]], number
    assert len(trained) == before, "nothing was computed again"


def poison(update: Update) -> Update:
    return replace(update, tensors={name: -50 * tensor for name, tensor in update.tensors.items()})


def poisoned(epoch: int) -> Change:
    """The second client poisons one round."""
    spoil = with_update(poison, 1000 - 7)

    def change(sent: Message, reply: Message) -> Message | None:
        return spoil(sent, reply) if sent.metadata.group_id == str(epoch) else reply

    return change


def left_out(sent: Message, reply: Message) -> Message | None:
    """The second client answers no more."""
    gone = sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000 - 7
    return None if gone else reply


def test_a_poisoned_round_that_was_the_last_is_undone_without_any_repeat(
    make_federation: MakeFederation, tmp_path: Path
) -> None:
    federation = made(make_federation, plan=FederationPlan(rounds=4, min_clients=1))
    states = played(federation, tmp_path, poisoned(1), until=2)
    again = played(federation, tmp_path, left_out, state=states[0])
    assert [each.server.round for each in again] == [2, 3, 4]
    assert whole(again[0]) != whole(states[1])


def test_later_rounds_are_answered_anew_only_as_often_as_the_client_allows(
    make_federation: MakeFederation, tmp_path: Path
) -> None:
    plan = FederationPlan(rounds=4, min_clients=1)
    for repeats in (0, 1, 2):
        federation, folder = made(make_federation, repeats, plan=plan), tmp_path / str(repeats)
        states = played(federation, folder, poisoned(1))
        if repeats < 2:
            with pytest.raises(RoundFailedError, match=f"round {3 + repeats}.*the client declined"):
                played(federation, folder, left_out, state=states[0])
            said = (folder / f"{CLIENT}.log").read_text()
            assert f"asked for round {3 + repeats} again, after round 4; {repeats} of {repeats} rounds" in said
        else:
            assert played(federation, folder, left_out, state=states[0])[-1].server.round == 4
            assert len(played(federation, folder, left_out, state=states[0])) == 3, "and again, by the same bytes"


def flat(reply: Outcome) -> Tensor:
    assert isinstance(reply, Trained)
    return torch.cat([tensor.flatten() for tensor in reply.update.tensors.values()])


@pytest.mark.parametrize("reproducible", [False, True])
def test_going_back_gets_no_noise_twice_and_no_more_looks_than_allowed(
    make_federation: MakeFederation, tmp_path: Path, reproducible: bool
) -> None:
    """A server averages noise out, or subtracts two answers under the same noise."""
    federation = made(make_federation, 3, dropout=0.0)

    def grid() -> LocalGrid:
        return grid_for(federation, state_dir=tmp_path, reproducible=reproducible)

    asked = train(federation, 1)
    looks = [ask(grid(), train(federation)), ask(grid(), asked, epoch=1)]
    seen = [flat(looks[-1])]
    for moved in (0.1, 0.2, 0.3, 0.4):
        looks += [ask(grid(), train(federation, 0, moved)), ask(grid(), asked, epoch=1)]
    assert [isinstance(each, Trained) for each in looks] == [True] * 5 + [False] * 5, "three more looks, no fourth"
    seen.append(flat(looks[3]))
    differ = (seen[0] != seen[1]).double().mean()
    assert differ > 0.99, "the same request, data, batches and weights, but for the noise"


def test_what_was_spent_stays_spent(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = made(make_federation, 9, defense=Counts(noise_std=0.1))
    federation = replace(federation, consent=replace(federation.consent, max_epsilon=5.0))
    grid = grid_for(federation, state_dir=tmp_path)
    answers = [ask(grid, train(federation, number), epoch=number) for number in (0, 1, 2)]
    assert all(isinstance(each, Trained) for each in answers)
    answers = [ask(grid, train(federation, 0, 0.1 * number)) for number in (1, 2, 3, 4)]
    assert [type(each) for each in answers] == [Trained, Trained, Declined, Declined]
    assert "would spend epsilon 6 of a budget of 5" in (tmp_path / f"{CLIENT}.log").read_text()
    assert isinstance(ask(grid, train(federation, 3), epoch=3), Declined), "and no later round either"


def test_rounds_are_counted_on(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = made(make_federation, 9)
    federation = replace(federation, consent=replace(federation.consent, max_rounds=3))
    grid = grid_for(federation, state_dir=tmp_path)
    answers = [ask(grid, train(federation, 0, 0.1 * number)) for number in range(5)]
    assert [type(each) for each in answers] == [Trained, Trained, Trained, Declined, Declined]


def test_a_repeated_round_has_one_score(make_federation: MakeFederation, tmp_path: Path) -> None:
    plan = FederationPlan(rounds=4, evaluate="clients")
    federation = made(make_federation, 1, plan=plan, aggregator=FedAvg(scheme="I"))
    grid = grid_for(federation, state_dir=tmp_path)
    assert isinstance(ask(grid, train(federation)), Trained)
    assert isinstance(ask(grid, score(federation, 0.0), turn=1), Evaluated)
    assert isinstance(ask(grid, score(federation, 0.1), turn=1), Evaluated), "another one, which counts as a repeat"
    assert isinstance(ask(grid, score(federation, 0.2), turn=1), Declined)
    assert isinstance(ask(grid, score(federation, 0.2), turn=2), Declined)
    assert isinstance(ask(grid, train(federation, 0, 0.1)), Declined)


def test_a_client_that_says_nothing_repeats_nothing() -> None:
    assert Consent().max_repeats == 0


def test_only_the_last_rounds_are_kept(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = made(make_federation, 9, plan=FederationPlan(rounds=9, keep_checkpoints=2))
    grid = grid_for(federation, state_dir=tmp_path)
    replies = [raw(grid, train(federation, number), epoch=number) for number in range(4)]
    for number in (2, 3):
        assert sent_bytes(raw(grid, train(federation, number), epoch=number)) == sent_bytes(replies[number])
    assert isinstance(ask(grid, train(federation, 1), epoch=1), Declined)
    assert (
        "asked for round 2 again, after round 4, which is not kept any more" in (tmp_path / f"{CLIENT}.log").read_text()
    )
