"""Attacks in closed form: they solve for the input and need no search."""
