"""Several victims attacked at once, by any attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.problem import VictimProgress
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction
from leaktight.runtime.executor import Tell
from leaktight.runtime.processes import available_cores, in_worker, one_thread, run_all


def reconstruct_all(
    attack: Attack,
    victims: Sequence[Sequence[Observation]],
    *,
    rngs: Sequence[Rng],
    workers: int | None = None,
    progress: VictimProgress | None = None,
    done: Callable[[int, Reconstruction], None] = lambda place, answer: None,
) -> list[Reconstruction]:
    """`attack.reconstruct` of every victim with its own `rng`; the answers in the order of the victims.

    How the work is spread is the attack's setting `parallel`; an attack that is no composition of `Matching` takes one
    process per victim. The answers do not depend on it beyond the rounding of floats.
    workers: how many processes there may be; None: one for every core. One is this process.
    progress: called with the place of the victim, then as for one attack. done: called with each answer at once.
    """
    if len(rngs) != len(victims):
        raise UsageError(f"expected one rng for each victim, got {len(rngs)} for {len(victims)} victims")
    if workers is not None and workers < 1:
        raise UsageError(f"expected workers >= 1, got {workers}")
    if not victims:
        return []
    with one_thread():
        composition = _composition(attack)
        if composition is not None:
            problems = (composition.problem(seen, rng=rng) for seen, rng in zip(victims, rngs, strict=True))
            return composition.solve_all(problems, rngs=rngs, workers=workers, progress=progress, done=done)
        jobs = (
            _Job(attack, seen, rng, place, progress is not None)
            for place, (seen, rng) in enumerate(zip(victims, rngs, strict=True))
        )
        number = 1 if in_worker() else workers or available_cores()
        answers: list[Reconstruction] = run_all(
            _reconstruct,
            jobs,
            workers=number,
            told=lambda place, message: progress(place, *message) if progress is not None else None,
            done=done,
        )
        return answers


def _composition(attack: Attack) -> Matching | None:
    """The attack as a composition, if that is all it is."""
    if isinstance(attack, Matching):
        return attack
    return attack.composition() if isinstance(attack, Preset) else None


@dataclass(frozen=True)
class _Job:
    attack: Attack
    seen: Sequence[Observation]
    rng: Rng
    place: int
    watched: bool


def _reconstruct(job: _Job, tell: Tell[tuple[int, float, Tensor | None]]) -> Reconstruction:
    def progress(iteration: int, loss: float, guess: Tensor | None) -> None:
        tell((iteration, loss, guess))

    return job.attack.reconstruct(job.seen, rng=job.rng, progress=progress if job.watched else None)
