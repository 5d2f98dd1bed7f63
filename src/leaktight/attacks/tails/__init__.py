"""Attacks on the tail of a network, the part behind one of its values: what enters it is found before the image."""
