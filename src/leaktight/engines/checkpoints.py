"""The checkpoints of a training run: the last few are kept, so that a run can go back to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leaktight.core.errors import CheckpointError, UsageError
from leaktight.core.files import make_private_folder
from leaktight.core.tensors import digest
from leaktight.core.types import State
from leaktight.fl.federation import FederationState
from leaktight.fl.state import ClientState, Conduct, load_checkpoint, save_checkpoint
from leaktight.results.folder import RunFolder, next_folder
from leaktight.results.schema import Round

_REPORTED = {"train_loss", "client"}
"""Fields of a round that come from the clients' reports, which a server does not receive."""


@dataclass(frozen=True)
class Undone:
    """Rounds that were set aside: what they cost the clients' budgets stays spent if they are trained differently.

    models: a hash of the model after each, by its number from 1. clients: the latest stored state of each client.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    clients: Mapping[str, State] = field(default_factory=dict)

    def pending(self, rounds: int) -> bool:
        """Whether one of them is still to come after this number of rounds."""
        return any(int(number) > rounds for number in self.models)

    def counted(self, state: FederationState) -> tuple[FederationState, Undone | None]:
        """The state after a round, with what was spent, if it is another one than before; and what is still to compare.

        A round that gives the same model as before sent the same: nothing more was spent.
        """
        done = state.server.round
        known = self.models.get(str(done))
        if known is not None and known != model_hash(state) and self.pending(done):
            return replace(state, clients={**state.clients, **self._spent(state)}), None
        return state, self if self.pending(done) else None

    def _spent(self, state: FederationState) -> dict[str, ClientState]:
        later = {name: ClientState.restored(each) for name, each in self.clients.items()}
        return {name: state.clients.get(name, _unasked(each)).with_spent(each) for name, each in later.items()}


@dataclass(frozen=True)
class Checkpoint:
    """What is stored after a round. state: None before the first.

    models: a hash of the model after each round so far, by its number from 1, where clients have budgets.
    """

    state: FederationState | None = None
    rows: tuple[Round, ...] = ()
    undone: Undone | None = None
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run: for each round the server's file, and another with the clients' private states.

    keep: how many are kept. retry: what to do if one is damaged; by default, to go back with --from-round.
    """

    folder: RunFolder
    keep: int = 1
    retry: str | None = None

    def store(self, point: Checkpoint) -> None:
        """Write a checkpoint, and remove those that are too old.

        The private file is written first: a run killed between the two resumes from the pair before.
        """
        assert point.state is not None
        stored, rounds = point.state.stored(), len(point.rows)
        private = {
            "clients": stored["clients"],
            "figures": [row.model_dump(include=_REPORTED) for row in point.rows],
            "undone": None if point.undone is None else vars(point.undone),
            "models": point.models,
        }
        public = [row.model_dump(exclude=_REPORTED) for row in point.rows]
        save_checkpoint(self.folder.private(rounds), private)
        save_checkpoint(self.folder.checkpoint(rounds), {"server": stored["server"], "rows": public})
        for number in self.folder.checkpoints[: -self.keep]:
            self.folder.checkpoint(number).unlink()
        for number in sorted(set(self.folder.all_private) - set(self.folder.checkpoints)):
            self.folder.private(number).unlink()

    def newest(self) -> Checkpoint:
        """The checkpoint of the last finished round."""
        if self.folder.older_checkpoint.exists():
            raise CheckpointError(
                f"{self.folder.older_checkpoint} is of an older version of Leaktight; start a new run in another --out"
            )
        kept = self.folder.checkpoints
        return self.read(kept[-1]) if kept else Checkpoint()

    def read(self, rounds: int) -> Checkpoint:
        """The checkpoint after this number of rounds."""
        remedy = self.retry or self._remedy(rounds)
        stored: Mapping[str, Any] = load_checkpoint(self.folder.checkpoint(rounds), remedy=remedy)
        private = load_checkpoint(self.folder.private(rounds), remedy=remedy)
        pairs = zip(stored["rows"], private["figures"], strict=True)
        return Checkpoint(
            FederationState.restored({"server": stored["server"], "clients": private["clients"]}),
            tuple(Round.model_validate({**row, **figures}) for row, figures in pairs),
            None if private["undone"] is None else Undone(**private["undone"]),
            private.get("models", {}),
        )

    def _remedy(self, rounds: int) -> str:
        earlier = [number for number in self.folder.checkpoints if number < rounds]
        where = f"--from-round {earlier[-1] + 1}" if earlier else "--from-round 1, which trains all rounds again"
        return f"go back with --resume {where}, or start a new run in another --out"

    def go_back(self, number: int, first: FederationState, *, counts: bool) -> Path:
        """Set aside all rounds from this one on, counted from 1, and return the folder with their files.

        first: the state before the first round. counts: whether clients have budgets; what was spent stays spent.
        """
        kept = self.folder.checkpoints
        possible = sorted({1, *(done + 1 for done in kept if done < kept[-1])}) if kept and kept[-1] else []
        if number not in possible:
            raise UsageError(
                f"expected --from-round to be one of {', '.join(map(str, possible)) or 'no round yet'}, got {number}; "
                "federation.keep_checkpoints says how many rounds are kept"
            )
        point = self.read(number - 1) if number - 1 in kept else Checkpoint(first)
        undone = self._undone(number) if counts else None
        if undone is not None or point.state is first:
            self.store_only(replace(point, undone=undone))
        return self._set_aside(number)

    def store_only(self, point: Checkpoint) -> None:
        """Write a checkpoint and remove none."""
        replace(self, keep=len(self.folder.checkpoints) + 1).store(point)

    def _undone(self, number: int) -> Undone:
        """What is known of the rounds from this one on; a damaged checkpoint tells nothing."""
        models: dict[str, str] = {}
        clients: Mapping[str, State] = {}
        for done in (each for each in self.folder.checkpoints if each >= number):
            try:
                point = self.read(done)
            except CheckpointError:
                continue
            assert point.state is not None
            models |= {each: known for each, known in point.models.items() if int(each) >= number}
            models[str(done)] = model_hash(point.state)
            earlier = point.undone or Undone()
            models |= {later: known for later, known in earlier.models.items() if int(later) > done}
            clients = earlier.clients or point.state.stored()["clients"]
        return Undone(models, clients)

    def _set_aside(self, number: int) -> Path:
        """Move files, the newest checkpoint first: at any moment the rest is a run that can be resumed."""
        aside = next_folder(self.folder.path, "set-aside")
        make_private_folder(aside)
        later = [done for done in reversed(self.folder.checkpoints) if done >= number]
        for path in (self.folder.summary, self.folder.model, *map(self.folder.checkpoint, later)):
            if path.exists():
                path.rename(aside / path.name)
        for done in self.folder.all_private:
            if done >= number:
                self.folder.private(done).rename(aside / self.folder.private(done).name)
        return aside


def _unasked(state: ClientState) -> ClientState:
    """The state of a client whose requests were all set aside."""
    return replace(state, guard={}, conduct=Conduct())


def model_hash(state: FederationState) -> str:
    """A hash of the global model."""
    return digest({**state.server.params, **state.server.buffers})
