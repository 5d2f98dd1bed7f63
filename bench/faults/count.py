"""What a part of the campaign counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """fault: what was done. wanted: what has to follow. tried, held: how often, and how often that followed.

    note: figures beside it (sizes, times, what happened where it did not hold).
    """

    fault: str
    wanted: str
    tried: int
    held: int
    note: str = ""
