"""Against several defenses at once: what is put on last is taken off first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.adaptive.knowing import Adaptation
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class KnowsStack(Adaptation):
    """A stack: the adaptations to its parts, one after the other, from the part that acted last to the first.

    parts: in the order of the stack. One that reads exact entries is of no use once a later one has blurred them, and
    is not among them.
    Assumes: what its parts assume. Cannot: undo a part whose traces a later one has covered.
    """

    parts: tuple[Adaptation, ...]

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        shown = list(seen)
        for part in reversed(self.parts):
            attack, shown = part.prepare(attack, shown)
        return attack, shown

    def view(self, view: View, seen: Observation) -> View:
        """In the order of the stack, since models of defenses act on a guess as these did on the truth."""
        for part in self.parts:
            view = part.view(view, seen)
        return view

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        staged = [part for part in self.parts if type(part).solve is not Adaptation.solve]
        if staged:
            return staged[-1].solve(attack, seen, rng=rng, progress=progress)
        return super().solve(attack, seen, rng=rng, progress=progress)


def readable(parts: Sequence[Adaptation | None]) -> tuple[Adaptation, ...]:
    """The adaptations that still find what they read; None is a part without one, which may have blurred everything."""
    kept: list[Adaptation] = []
    blurred = False
    for part in reversed(parts):
        if part is not None and not (part.exact and blurred):
            kept.insert(0, part)
        blurred = blurred or part is None or part.blurs
    return tuple(kept)
