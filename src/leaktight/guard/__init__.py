"""The client's guard: checks the model that a server sends before training on it."""

from leaktight.guard.guard import BroadcastGuard, Finding, Judgement

__all__ = ["BroadcastGuard", "Finding", "Judgement"]
