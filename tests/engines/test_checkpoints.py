"""Going back in a run: the last checkpoints are kept, and rounds that are trained again cost what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from leaktight.core.errors import CheckpointError, UsageError
from leaktight.core.privacy import Spent
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State, Update
from leaktight.crypto.paillier import Paillier
from leaktight.engines.checkpoints import Checkpoints
from leaktight.engines.training import train
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.consent import Consent
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.federation import Federation
from leaktight.fl.plan import FederationPlan
from leaktight.results.folder import RunFolder, open_run
from leaktight.results.schema import Round, TrainingSummary

MakeFederation = Callable[..., Federation]
ROUNDS = 5


@dataclass(frozen=True)
class Poisoned(Defense):
    """Some clients send nonsense in one round, as long as `on` holds. Counts its rounds as a budget."""

    round: int = 3
    on: list[bool] = field(default_factory=lambda: [True], repr=False)
    budget: bool = False
    whom: str = "client-000"

    @property
    def private(self) -> bool:
        return self.budget

    def spent(self, state: State) -> Spent:
        return Spent(float(state.get("rounds", 0)), 1e-5)

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        return step.gradient, {**state, "round": step.round + 1}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        state = {**state, "rounds": state.get("rounds", 0) + 1}
        report("epsilon", float(state["rounds"]))
        if self.on[0] and state["round"] == self.round and any(str(part).startswith(self.whom) for part in rng.path):
            update = replace(update, tensors={name: torch.ones_like(each) for name, each in update.tensors.items()})
        return update, state


@pytest.fixture
def federation(make_federation: MakeFederation) -> Federation:
    return make_federation(clients=2, plan=FederationPlan(rounds=ROUNDS))


def trained(federation: Federation, path: Path, **options: object) -> TrainingSummary:
    resume = (path / "config.toml").exists()
    with open_run(path, "", resume=resume) as folder:
        return train(federation.keyed(bytes(32)), folder, workers=1, keep=3, **options)  # type: ignore[arg-type]


def test_the_last_checkpoints_are_kept(federation: Federation, tmp_path: Path) -> None:
    trained(federation, tmp_path)
    folder = RunFolder(tmp_path)
    assert folder.checkpoints == folder.all_private == [3, 4, 5]
    assert [len(Checkpoints(folder).read(number).rows) for number in (3, 4, 5)] == [3, 4, 5]


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_run_that_goes_back_ends_in_the_same_model(federation: Federation, tmp_path: Path, number: int) -> None:
    whole = trained(federation, tmp_path)
    rows: list[Round] = []
    again = trained(federation, tmp_path, from_round=number, after_round=rows.append)
    assert again.model_digest == whole.model_digest
    assert [(row.round, row.accuracy, row.loss, row.train_loss) for row in again.rounds] == [
        (row.round, row.accuracy, row.loss, row.train_loss) for row in whole.rounds
    ]
    aside = {path.name for path in (tmp_path / "set-aside-001").iterdir()}
    later = [each for each in (3, 4, 5) if each >= number]
    assert aside == {"summary.json", "model.safetensors"} | {
        f"{kind}-{each:05d}.state" for kind in ("checkpoint", "clients") for each in later
    }
    assert RunFolder(tmp_path).checkpoints == [3, 4, 5]
    assert trained(federation, tmp_path).model_digest == whole.model_digest, "going on is still possible"


def test_cut_off_after_going_back_it_still_ends_in_the_same_model(federation: Federation, tmp_path: Path) -> None:
    whole = trained(federation, tmp_path)

    def cut(row: Round) -> None:
        raise KeyboardInterrupt

    for number in (5, 4, 1):
        with pytest.raises(KeyboardInterrupt):
            trained(federation, tmp_path, from_round=number, after_round=cut)
        assert not (tmp_path / "summary.json").exists()
    assert trained(federation, tmp_path).model_digest == whole.model_digest


@pytest.mark.parametrize(("number", "said"), [(2, "one of 1, 4, 5, got 2"), (6, "one of 1, 4, 5, got 6")])
def test_rounds_that_are_not_kept_are_refused(federation: Federation, tmp_path: Path, number: int, said: str) -> None:
    trained(federation, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UsageError, match=said):
        trained(federation, tmp_path, from_round=number)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    with pytest.raises(UsageError, match="no round yet"):
        trained(federation, tmp_path / "new", from_round=1)


def test_a_damaged_target_leaves_everything_in_place(federation: Federation, tmp_path: Path) -> None:
    trained(federation, tmp_path)
    RunFolder(tmp_path).private(3).write_bytes(b"")
    with pytest.raises(CheckpointError, match="--from-round 1, which trains all rounds again"):
        trained(federation, tmp_path, from_round=4)
    assert RunFolder(tmp_path).checkpoints == [3, 4, 5]
    RunFolder(tmp_path).private(5).write_bytes(b"")
    with pytest.raises(CheckpointError, match="--from-round 5"):
        trained(federation, tmp_path)


def test_a_poisoned_round_is_undone(make_federation: MakeFederation, tmp_path: Path) -> None:
    plan, defense = FederationPlan(rounds=ROUNDS), Poisoned(round=4)
    federation = make_federation(clients=2, plan=plan, defense=defense)
    clean = trained(make_federation(clients=2, plan=plan, defense=Poisoned(round=4, on=[False])), tmp_path / "clean")
    poisoned = trained(federation, tmp_path / "run")
    assert poisoned.model_digest != clean.model_digest
    defense.on[0] = False
    assert trained(federation, tmp_path / "run", from_round=4).model_digest == clean.model_digest


@pytest.mark.parametrize("cut", [False, True])
def test_what_was_spent_stays_spent(make_federation: MakeFederation, tmp_path: Path, cut: bool) -> None:
    """Rounds 4 and 5 are trained twice, round 5 for two models: six releases, not five."""
    defense = Poisoned(round=4, budget=True)
    federation = make_federation(clients=2, plan=FederationPlan(rounds=ROUNDS), defense=defense)
    first = trained(federation, tmp_path)
    assert [row.client["epsilon"] for row in first.rounds] == [1, 2, 3, 4, 5]
    same = trained(federation, tmp_path, from_round=4)
    assert [row.client["epsilon"] for row in same.rounds] == [1, 2, 3, 4, 5], "the same messages cost nothing"
    defense.on[0] = False

    def stop(row: Round) -> None:
        if cut and row.round == 4:
            raise KeyboardInterrupt

    try:
        trained(federation, tmp_path, from_round=4, after_round=stop)
    except KeyboardInterrupt:
        trained(federation, tmp_path)
    again = Checkpoints(RunFolder(tmp_path)).newest()
    assert [row.client["epsilon"] for row in again.rows] == [1, 2, 3, 4, 6]
    assert again.state is not None
    assert [state.conduct.rounds for state in again.state.clients.values()] == [6, 6]
    limited = replace(federation, consent=Consent(max_epsilon=6))
    defense.on[0] = True
    with pytest.raises(Exception, match="would spend epsilon 7"):
        trained(limited, tmp_path, from_round=4)


@pytest.mark.parametrize("damaged", [(), (3,), (3, 4)], ids=str)
def test_rounds_without_a_checkpoint_are_compared_too(
    make_federation: MakeFederation, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Checkpoints of rounds 3 to 5 are kept. From round 2 on all is trained for other models: four more releases."""
    defense = Poisoned(round=1, budget=True)
    federation = make_federation(clients=2, plan=FederationPlan(rounds=ROUNDS), defense=defense)
    trained(federation, tmp_path)
    for number in damaged:
        RunFolder(tmp_path).checkpoint(number).write_bytes(b"")
    same = trained(federation, tmp_path, from_round=1)
    assert [row.client["epsilon"] for row in same.rounds] == [1, 2, 3, 4, 5]
    defense.on[0] = False
    again = trained(federation, tmp_path, from_round=1)
    assert [row.client["epsilon"] for row in again.rounds] == [1, 6, 7, 8, 9]


def test_who_was_asked_in_rounds_that_were_set_aside_only_is_asked_again(
    make_federation: MakeFederation, tmp_path: Path
) -> None:
    defense = Poisoned(round=4, budget=True, whom="client")
    federation = make_federation(clients=10, plan=FederationPlan(rounds=ROUNDS, per_round=2), defense=defense)
    trained(federation, tmp_path)
    folder = RunFolder(tmp_path)
    states = {number: Checkpoints(folder).read(number).state for number in (4, 5)}
    assert states[4] is not None
    assert states[5] is not None
    assert set(states[5].clients) > set(states[4].clients), "somebody is asked in the last round first"
    defense.on[0] = False
    trained(federation, tmp_path, from_round=4)
    again = Checkpoints(folder).newest().state
    assert again is not None
    spent = {name: state.defense["rounds"] for name, state in again.clients.items()}
    before = {name: state.defense["rounds"] for name, state in states[5].clients.items()}
    last = {name for name, state in again.clients.items() if state.conduct.round == 4}
    assert len(last) == 2
    assert spent == {name: count + (name in last) for name, count in before.items()}


def test_an_encrypted_run_goes_back_with_its_keys(make_federation: MakeFederation, tmp_path: Path) -> None:
    cipher = Paillier(key_bits=256, unsafe_small=True)
    federation = make_federation(
        clients=2, plan=FederationPlan(rounds=3), aggregator=Encrypted(of=FedAvg(), cipher=cipher)
    )
    whole = trained(federation, tmp_path)
    for number in (3, 1):
        assert trained(federation, tmp_path, from_round=number).model_digest == whole.model_digest
