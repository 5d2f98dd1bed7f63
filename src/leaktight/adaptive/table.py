"""Which attacker expects which defense."""

from __future__ import annotations

from collections.abc import Mapping

from leaktight.adaptive.adadefense import KnowsAdaDefense
from leaktight.adaptive.clipping import KnowsClipping
from leaktight.adaptive.fedkl import KnowsFedKl
from leaktight.adaptive.graddefense import KnowsGradDefense
from leaktight.adaptive.knowing import Adaptation, Knowing, composition_of
from leaktight.adaptive.lrp import KnowsRates
from leaktight.adaptive.noise import KnowsNoise
from leaktight.adaptive.outpost import KnowsOutpost
from leaktight.adaptive.precode import KnowsPrecode
from leaktight.adaptive.private import KnowsClientDp, KnowsDpSgd
from leaktight.adaptive.soteria import KnowsSoteria
from leaktight.adaptive.stack import KnowsStack, readable
from leaktight.adaptive.support import KnowsSampling, KnowsSupport
from leaktight.core.protocols import Attack, Defense
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
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack

ADAPTATIONS: Mapping[type[Defense], type[Adaptation]] = {
    AdditiveNoise: KnowsNoise,
    Clipping: KnowsClipping,
    GradientCompression: KnowsSupport,
    MinMaxSampling: KnowsSampling,
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
    """The attack made for a defense; None where the attack cannot be changed, or nobody knows how."""
    base, adaptation = composition_of(attack), adaptation_to(defense)
    return None if base is None or adaptation is None else Knowing(attack=base, adaptation=adaptation)


def adaptation_to(defense: Defense) -> Adaptation | None:
    """What changes for an attacker who expects this defense; of a stack, what changes for each of its parts."""
    if isinstance(defense, Stack):
        parts = [adaptation_to(part) for part in defense.parts if type(part) is not Defense]
        kept = readable(parts)
        return KnowsStack(defense=defense, parts=kept) if kept else None
    kind = ADAPTATIONS.get(type(defense))
    return None if kind is None else kind(defense=defense)
