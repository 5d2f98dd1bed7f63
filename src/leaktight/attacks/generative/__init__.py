"""Attacks that search among the images of a generator."""
