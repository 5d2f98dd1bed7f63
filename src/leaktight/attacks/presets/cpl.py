"""CPL: iDLG from a patterned start."""

from __future__ import annotations

from dataclasses import dataclass

from leaktight.attacks.matching.sought import Patterned, Start
from leaktight.attacks.presets.idlg import IdlgAttack


@dataclass(frozen=True, kw_only=True)
class Cpl(IdlgAttack):
    """CPL: iDLG from a start that repeats one random patch.

    patch: the side of the patch in pixels.

    Reference: Wei et al. 2020. Differs from the paper: as DLG here; without the term that matches predictions, which
    the published code leaves out as well.
    """

    patch: int = 16

    def first_images(self) -> Start:
        return Patterned(patch=self.patch, distribution="uniform")
