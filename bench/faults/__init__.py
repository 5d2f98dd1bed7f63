"""The fault campaign: break runs and federations on purpose, and count how often nothing was lost.

`python -m bench faults` runs all parts and renders docs/results/reliability.md; `python -m bench faults PART ...` runs
some. A part is a module of this folder with `counts() -> Iterator[Count]`. Each part's counts are kept in
`bench/faults/counts/PART.json`, so that parts can be run apart.
"""

from bench.faults.main import main

__all__ = ["main"]
