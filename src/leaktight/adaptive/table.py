"""The adaptation of each defense, and of stacks of defenses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaktight.adaptive.adadefense import KnowsAdaDefense
from leaktight.adaptive.auto import Auto, KnowingAuto
from leaktight.adaptive.clipping import KnowsClipping
from leaktight.adaptive.fedkl import KnowsFedKl
from leaktight.adaptive.graddefense import KnowsGradDefense
from leaktight.adaptive.knowing import Adaptation, Case, Knowing, composition_of
from leaktight.adaptive.lrp import KnowsRates
from leaktight.adaptive.noise import KnowsClientDp, KnowsDpSgd, KnowsNoise
from leaktight.adaptive.outpost import KnowsOutpost
from leaktight.adaptive.percentile_privacy import KnowsPercentile
from leaktight.adaptive.precode import KnowsPrecode
from leaktight.adaptive.sampling import KnowsSampling
from leaktight.adaptive.support import KnowsSoteria, KnowsSupport
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Attack, Defense, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction
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

ADAPTATIONS: Mapping[type[Defense], type[Adaptation]] = {
    AdditiveNoise: KnowsNoise,
    Clipping: KnowsClipping,
    GradientCompression: KnowsSupport,
    MinMaxSampling: KnowsSampling,
    PercentilePrivacy: KnowsPercentile,
    Soteria: KnowsSoteria,
    GradDefense: KnowsGradDefense,
    Outpost: KnowsOutpost,
    DpSgd: KnowsDpSgd,
    FedCdp: KnowsDpSgd,
    ClientDp: KnowsClientDp,
    AdaDefense: KnowsAdaDefense,
    Lrp: KnowsRates,
    AdaLrp: KnowsRates,
    FedKl: KnowsFedKl,
    Precode: KnowsPrecode,
}


def adapt(attack: Attack, defense: Defense) -> Attack | None:
    """The attack adapted to a defense; None if the attack cannot be adapted or the defense has no adaptation."""
    adaptation = adaptation_to(defense)
    if isinstance(attack, Auto):
        return None if adaptation is None else KnowingAuto(auto=attack, adaptation=adaptation)
    base = composition_of(attack)
    return None if base is None or adaptation is None else Knowing(attack=base, adaptation=adaptation)


def unable(defense: Defense, case: Case) -> str | None:
    """Why there is no attacker who knows this defense in this case, as a phrase; None if there is one."""
    adaptation = adaptation_to(defense)
    return "nothing is known that helps against it" if adaptation is None else adaptation.unable(case)


def adaptation_to(defense: Defense) -> Adaptation | None:
    """The adaptation to a defense, or to the parts of a stack; None if there is none."""
    if isinstance(defense, Stack):
        parts = [adaptation_to(part) for part in defense.parts if type(part) is not Defense]
        kept = readable(parts)
        return KnowsStack(defense=defense, parts=kept) if kept else None
    kind = ADAPTATIONS.get(type(defense))
    return None if kind is None else kind(defense=defense)


@dataclass(frozen=True, kw_only=True)
class KnowsStack(Adaptation):
    """A stack: the adaptations to its parts, from the part that acted last to the first.

    parts: in the order of the stack, without those that need exact entries which a later part has blurred.
    Assumes: what its parts assume. Cannot: undo a part whose effect a later part has hidden.
    """

    parts: tuple[Adaptation, ...]

    def unable(self, case: Case) -> str | None:
        """That of its parts, if none of them helps."""
        reasons = [part.unable(case) for part in self.parts]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        shown = list(seen)
        for part in reversed(self.parts):
            attack, shown = part.prepare(attack, shown)
        return attack, shown

    def view(self, view: View, seen: Observation) -> View:
        """Parts in the order of the stack, so that models of defenses act on a guess in the order of the defenses."""
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
    """The adaptations that are still useful; None is a part without one, which may have blurred every entry."""
    kept: list[Adaptation] = []
    blurred = False
    for part in reversed(parts):
        if part is not None and not (part.exact and blurred):
            kept.insert(0, part)
        blurred = blurred or part is None or part.blurs
    return tuple(kept)
