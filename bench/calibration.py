"""How often the judge is wrong: intervals that miss the mean, whole audits that say too much or too little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench import coverage

PARTS: Mapping[str, Callable[[], None]] = {"intervals": coverage.main}


def main(parts: Sequence[str]) -> None:
    """Run the parts that are named, or all."""
    for name in parts or PARTS:
        print(f"== calibration {name}")
        PARTS[name]()
