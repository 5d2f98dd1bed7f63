"""In which settings two records of a run differ, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from leaktight.core.errors import ResultsError, UsageError
from leaktight.core.reading import parse_toml
from leaktight.core.text import printable

Table: TypeAlias = Mapping[str, object]
LONGEST = 80
MOST_NAMED = 3


@dataclass(frozen=True)
class Change:
    """A setting with its value in the run and the new one; None where it is not set. reason: why it is refused."""

    setting: str
    before: object
    after: object
    reason: str = ""

    @property
    def words(self) -> str:
        """The change as a reader writes it.

        >>> Change("audit.trials", 2, 10).words, Change("attack", None, {"kind": "dlg"}).words
        ('audit.trials from 2 to 10', 'attack dlg is new')
        """
        if self.before is None:
            return f"{self.setting} {value_words(self.after)} is new"
        return f"{self.setting} from {value_words(self.before)} to {value_words(self.after)}"

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.setting} is {value_words(self.before)} there and {value_words(self.after)} here{why}"


def read_record(text: str, source: object) -> Table:
    """The tables of a run's `config.toml`."""
    return parse_toml(text, source, ResultsError)


def changes(before: Table, after: Table, inside: str = "") -> Iterator[Change]:
    """The settings in which two tables differ; a table of another kind is one. inside: the table's name, with a dot."""
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("kind") == new.get("kind"):
            yield from changes(old, new, f"{inside}{name}.")
        elif old != new:
            yield Change(f"{inside}{name}", old, new)


def refusal(path: object, refused: Sequence[Change]) -> UsageError:
    """The error about settings that a finished part of the run does not allow to change."""
    more = len(refused) - MOST_NAMED
    named = [*map(str, refused[:MOST_NAMED]), *([f"{more} more"] if more > 0 else [])]
    return UsageError(
        f"{path} holds a run with other settings: {'; '.join(named)}. Resume it with its own settings, or choose "
        "another --out for a new run"
    )


def value_words(value: object) -> str:
    """A setting as a reader writes it.

    >>> value_words(None), value_words(True), value_words(["a", 2]), value_words({"kind": "noise", "std": 0.1})
    ('not set', 'true', '[a, 2]', 'noise (std 0.1)')
    """
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        own = ", ".join(f"{name} {value_words(item)}" for name, item in value.items() if name != "kind")
        words = f"{value['kind']} ({own})" if "kind" in value and own else str(value.get("kind", own))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        words = f"[{', '.join(map(value_words, value))}]"
    else:
        words = str(value)
    return printable(words, LONGEST)
