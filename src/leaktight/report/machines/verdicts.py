"""The verdicts of a run by defense and track, and which of them a decision rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from leaktight.report.words import defense_name
from leaktight.results.schema import UNDEFENDED, Cell, Summary, Track, Verdict, severity, training_name


@dataclass(frozen=True)
class Place:
    """A defense in a track."""

    track: Track
    defense: str

    def words(self, summary: Summary) -> str:
        """Its name for readers, with the settings of the defense in this run."""
        return f"{defense_name(summary, self.defense, self.track)} ({self.track})"

    @property
    def training(self) -> str:
        """The name of its federation in `Summary.training_failed`."""
        return training_name(self.track, self.defense)


def place_of(entry: Verdict | Cell) -> Place:
    return Place(entry.track, entry.defense)


def worst_verdicts(summary: Summary, planned: Iterable[Place] = ()) -> dict[Place, Verdict | None]:
    """The worst verdict on each defense in each track that was attacked or should have been; None for none.

    planned: what the run was to attack, if more is known than the summary says.
    """
    found: dict[Place, Verdict | None] = dict.fromkeys(planned)
    found |= {place_of(cell): None for cell in summary.cells if cell.role == "attack"}
    for entry in sorted(summary.verdicts, key=lambda entry: severity(entry.verdict)):
        if found.get(place_of(entry)) is None:
            found[place_of(entry)] = entry
    for name in summary.training_failed:
        if all(place.training != name for place in found):
            found[Place("diagnostic", name)] = None
    return found


def deciding(summary: Summary, planned: Iterable[Place] = ()) -> dict[Place, Verdict | None]:
    """The verdicts that a decision rests on: those on defended updates; without a defense, those on undefended ones."""
    found = worst_verdicts(summary, planned)
    defended = {place: entry for place, entry in found.items() if place.defense != UNDEFENDED}
    return defended or found


def cells_of(summary: Summary) -> Mapping[Place, list[Cell]]:
    """The cells of attacks, by place."""
    found: dict[Place, list[Cell]] = {}
    for cell in summary.cells:
        if cell.role == "attack":
            found.setdefault(place_of(cell), []).append(cell)
    return found
