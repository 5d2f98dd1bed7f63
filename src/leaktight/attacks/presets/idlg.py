"""iDLG: DLG with the label read from the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Idlg, Joint
from leaktight.attacks.presets.dlg import Dlg


@dataclass(frozen=True, kw_only=True)
class IdlgAttack(Dlg):
    """iDLG: the label is read from the last layer, then the image is searched as in DLG.

    Reference: Zhao et al. 2020. Assumes: one example, features that are not negative.
    """

    def own_labels(self) -> LabelStrategy | Joint:
        return Idlg()
