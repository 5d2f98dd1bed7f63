"""Hostile inputs: files that break a reader which trusts them. Each says how it is made and what is to refuse it."""

from bench.faults.hostile import archives, configs, results, sets, tensors
from bench.faults.hostile.case import Case

CASES: tuple[Case, ...] = (*tensors.CASES, *configs.CASES, *sets.CASES, *archives.CASES, *results.CASES)

__all__ = ["CASES", "Case"]
