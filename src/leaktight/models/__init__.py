"""Victim networks. Settings build a network; the normalisation of its inputs is inside it."""
