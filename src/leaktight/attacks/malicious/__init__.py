"""Attacks of a server that changes the model it sends."""
