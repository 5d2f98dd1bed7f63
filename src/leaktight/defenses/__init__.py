"""Defenses: what a client does to its update, one file each."""

from leaktight.defenses.wrap import wrap

__all__ = ["wrap"]
