"""The client's guard: a look at the model that a server sends, before anything is trained on it."""

from leaktight.guard.guard import BroadcastGuard, Finding, Judgement

__all__ = ["BroadcastGuard", "Finding", "Judgement"]
