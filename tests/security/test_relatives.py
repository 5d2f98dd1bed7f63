"""An attack's random stream is no relative of a client's: whoever walks from it finds nothing of what a client drew."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.audits.scenes import small_experiment
from tests.security.scan import ALIKE, Numbers
from tests.security.scenes import Overheard, overhearing
from torch import Tensor

from leaktight.audits.experiment import TrialRunner, judges_stream
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.core.protocols import Attack, Defense, Progress
from leaktight.core.rng import NoSecretsError, Rng
from leaktight.core.types import Batch, Observation, Reconstruction, RoundTrace
from leaktight.engines import inprocess
from leaktight.fl.messages import Train

KEY = hashlib.sha256(b"the run's key").digest()
SMALL_SEEDS = 100


@dataclass
class Loot:
    """What the attack was given, and how near its best guess of the noise came."""

    given: list[Any] = field(default_factory=list)
    noise: Numbers = field(default_factory=lambda: np.zeros(0))
    best: float = 0.0
    tried: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Walker(Attack):
    """Knows every path at which clients drew, what they sent without noise, and the code; and has the stream it got.

    noise_in: what the update holds beyond the gradient.
    """

    heard: Overheard
    noise_in: Callable[[Observation], Tensor]
    loot: Loot

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        self.heard.listening = False
        self.loot.given += [seen, rng, progress]
        self.loot.noise = self.noise_in(seen[0]).numpy()
        self.walk(rng)
        number = seen[0].batch_size or 0
        guess = Batch(torch.full((number, *seen[0].inputs.shape), 0.5), torch.zeros(number, dtype=torch.long))
        return Reconstruction(guess, float("inf"))

    def walk(self, rng: Rng) -> None:
        """Draw at every place that could be the client's, as seen from this stream, and compare."""
        paths = self._paths()
        for start in (rng, Rng(rng.seed, key=rng.key), *self._cousins(rng)):
            for path in paths:
                for place in _reached(start, path):
                    for draw in _draws(place):
                        self._compare(draw)

    def _paths(self) -> set[tuple[int | str, ...]]:
        """Every path at which clients drew, and every end of one."""
        drawn = [place.path for place in self.heard.places if "client" in place.path]
        return {path[start:] for path in drawn for start in range(len(path) + 1)}

    def _cousins(self, rng: Rng) -> Iterator[Rng]:
        """The seed of a config is a small number: which one was it? And which key would somebody lazy have taken?"""
        for seed in range(SMALL_SEEDS):
            if Rng(seed).child("trial", 0, "attack", "walker").detached() == rng:
                yield Rng(seed)
                encoded = str(seed).encode()
                for key in (bytes(32), seed.to_bytes(32, "big"), hashlib.sha256(encoded).digest(), encoded * 32):
                    yield Rng(seed, key=key[:32])
                yield Rng(seed, key=Rng(seed).entropy().to_bytes(32, "big"))

    def _compare(self, draw: Callable[[int], Numbers]) -> None:
        self.loot.tried += 1
        try:
            drawn = draw(len(self.loot.noise))
        except NoSecretsError:
            self.loot.refused += 1
            return
        self.loot.best = max(self.loot.best, abs(float(np.corrcoef(drawn, self.loot.noise)[0, 1])))


def _reached(start: Rng, path: tuple[int | str, ...]) -> Iterator[Rng]:
    """The place at the end of a path, with the key of the beginning or one that was derived on the way."""
    yield start.child(*path)
    if start.key is not None:
        for length in range(len(path)):
            yield start.child(*path[:length]).apart().child(*path[length:])


def _draws(place: Rng) -> tuple[Callable[[int], Numbers], ...]:
    return (
        lambda count: place.secret().normal(count, np.float32),
        lambda count: place.secret().normal(count),
        lambda count: torch.randn(count, generator=place.public()).numpy(),
        lambda count: place.public_numpy().normal(size=count),
    )


def _noise(experiment: Experiment, seen: Observation) -> Tensor:
    """What was sent without what the same client sends undefended."""
    plain = experiment.attacked_federation(Defense(), 0)
    victim = experiment.victim(0)
    aggregator, sizes = plain.setup.aggregator, plain.sizes
    scale = aggregator.loss_scale(sizes[victim], list(sizes.values()))
    asked = Train(seen.broadcast, experiment.attacked.learning_rate, aggregator.update_kind, scale)
    clean = plain.client(victim).train_round(asked, None).trained.update.tensors
    return torch.cat([(tensor - clean[name]).reshape(-1) for name, tensor in seen.update.tensors.items()])


@pytest.fixture
def audited(tmp_path: Path) -> tuple[Experiment, Walker]:
    """An audit of additive noise by the walker, after its first trial."""
    experiment = small_experiment(tmp_path).keyed(KEY)
    with overhearing() as heard:
        walker = Walker(heard, lambda seen: _noise(experiment, seen), Loot())
        experiment = replace(experiment, attacks=(AttackEntry("walker", {}, walker),))
        spec = next(each for each in experiment.trials if each.defense.name == "noise" and each.trial == 0)
        result = TrialRunner(experiment)(spec.id, print)
    assert result.trial.error is None
    return experiment, walker


def test_nothing_drawn_from_the_stream_of_an_attack_is_a_clients_noise(audited: tuple[Experiment, Walker]) -> None:
    _, walker = audited
    loot = walker.loot
    assert np.std(loot.noise) > 0
    assert loot.best < ALIKE / 2
    assert 0 < loot.refused < loot.tried


def test_it_is_found_from_a_relative(audited: tuple[Experiment, Walker]) -> None:
    experiment, walker = audited
    assert walker.loot.best < ALIKE / 2
    walker.walk(experiment.rng(0).child("attack", "walker"))
    assert walker.loot.best > ALIKE


def test_not_even_the_small_seed_of_a_config_is_recognised(audited: tuple[Experiment, Walker]) -> None:
    experiment, walker = audited
    assert experiment.seed < SMALL_SEEDS
    rng = next(each for each in walker.loot.given if isinstance(each, Rng))
    assert (rng.path, rng.key) == ((), None), "it has no parent"
    assert not list(walker._cousins(rng))
    without_key = Rng(experiment.seed).child("trial", 0, "attack", "walker").detached()
    assert {cousin.seed for cousin in walker._cousins(without_key)} == {experiment.seed}
    with pytest.raises(NoSecretsError, match="secret key"):
        rng.child("client", "client-000").secret()


@dataclass
class Draws:
    """What the judge and the victim drew in the first trial, by what can be rebuilt from an order of indices."""

    experiment: Experiment
    heard: Overheard

    def rebuilt(self, starts: Iterable[Rng]) -> set[str]:
        """What can be rebuilt by somebody who knows all code and all paths, from one of these places in the tree."""
        runner = TrialRunner(self.experiment)
        client = self.experiment.attacked_federation(Defense(), 0).client(self.experiment.victim(0))
        truth = _truth_of(self.experiment)
        first = Batch(truth.inputs[:1], truth.targets[:1])
        pool = runner.decoys._places[int(first.targets)]
        decoys = runner.decoys.draw(first, first.inputs, judges_stream(self.experiment.rng(0).child("decoys")))
        assert decoys is not None
        test = self.experiment.federation.dataset.test
        found = set()
        for start in starts:
            for order in self._orders(start, [("public",)], len(test)):
                if torch.equal(test.batch(order[:20]).inputs, runner.public_data.inputs[:20]):
                    found.add("public data")
            for order in self._orders(start, [("decoys",), ("trial", 0, "decoys")], len(pool)):
                known = {each.numpy().tobytes() for each in runner.decoys.examples.inputs[pool[order[:20]]]}
                if len(known & {each.tobytes() for each in decoys.inputs[:20].numpy()}) >= 18:
                    found.add("decoys")
            for order in self._orders(start, self._batch_paths(), len(client.train)):
                if torch.equal(client.train.batch(order[: len(truth)]).inputs, truth.inputs):
                    found.add("batch")
        return found

    def _batch_paths(self) -> list[tuple[int | str, ...]]:
        drawn = {place.path for place in self.heard.places if "batches" in place.path}
        return sorted({path[start:] for path in drawn for start in range(len(path) + 1)}, key=str)

    @staticmethod
    def _orders(start: Rng, paths: Iterable[tuple[int | str, ...]], count: int) -> Iterator[Tensor]:
        """Every order that can be drawn at the end of one of the paths."""
        for path in paths:
            for place in _reached(start, path):
                yield torch.randperm(count, generator=place.public())
                yield torch.from_numpy(place.public_numpy().permutation(count))
                with suppress(NoSecretsError):
                    yield place.secret().permutation(count)
                    yield torch.from_numpy(judges_stream(place).permutation(count))


def _truth_of(experiment: Experiment) -> Batch:
    traces: list[RoundTrace] = []
    federation = experiment.attacked_federation(Defense(), 0)
    inprocess.run(federation, workers=1, until=1, record=traces.append, score=False)
    return traces[0].clients[experiment.victim(0)].truth.examples


def test_batch_public_data_and_decoys_cannot_be_rebuilt(audited: tuple[Experiment, Walker]) -> None:
    experiment, walker = audited
    rng = next(each for each in walker.loot.given if isinstance(each, Rng))
    draws = Draws(replace(experiment, attacked=replace(experiment.attacked, samples=4, batch_size=4)), walker.heard)
    guessed = [Rng(seed) for seed in range(experiment.seed + 1)]
    zero = Rng(experiment.seed, key=bytes(32))
    assert not draws.rebuilt([rng, zero, *guessed])
    assert draws.rebuilt([experiment.rng(0), Rng(experiment.seed, key=KEY)]) == {"public data", "decoys", "batch"}


def test_no_key_can_be_reached_from_what_an_attack_is_given(audited: tuple[Experiment, Walker]) -> None:
    experiment, walker = audited
    keys = {KEY} | {place.key for place in walker.heard.places if place.key is not None}
    assert not holds_any(keys, walker.loot.given)
    client = experiment.attacked_federation(Defense(), 0).client(experiment.victim(0))
    assert holds_any(keys, client)
    assert holds_any(keys, lambda: experiment)


def holds_any(keys: set[bytes], thing: Any) -> bool:
    """Whether one of the keys lies somewhere among the parts of a thing, or of what its functions remember."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | BuiltinFunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, bytes | bytearray) and any(key in each for key in keys):
            return True
        waiting += _parts(each)
    return False


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, FunctionType):
        return [*(cell.cell_contents for cell in thing.__closure__ or ()), *(thing.__defaults__ or ())]
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    return list(getattr(thing, "__dict__", {}).values())
