"""Settings of table functions beside those of the config: "own.seeds=3"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Values: TypeAlias = dict[str, dict[str, dict[str, float]]]
"""By row and column, the values by victim or seed."""

_OWN = "own."


def divided(settings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The function's own settings by name, and those of the config. The last one of a name counts.

    >>> divided(["own.seeds=3", "seed=1", "own.seeds=1"])
    ({'seeds': '1'}, ['seed=1'])
    """
    own = [each.removeprefix(_OWN).partition("=") for each in settings if each.startswith(_OWN)]
    return {name: value for name, _, value in own}, [each for each in settings if not each.startswith(_OWN)]


def workers(own: Mapping[str, str]) -> int | None:
    """How many processes train the clients: own.workers, else one for each core.

    >>> workers({"workers": "1"}), workers({})
    (1, None)
    """
    return int(own["workers"]) if "workers" in own else None
