"""Attacks in closed form, which prove what they find."""
