"""Leaktight measures what a federated-learning update gives away about the training data behind it."""

from importlib.metadata import version

__version__ = version("leaktight")
