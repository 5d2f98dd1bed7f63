"""Attacks adapted to a defense whose settings are known, but not its secrets. One file for each mechanism."""
