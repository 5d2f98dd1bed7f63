"""Attacks: what can be reconstructed from an update."""
