"""The verdict on a defense: the worst over attackers and victims, as one of five words with its reason.

- **reconstructed**: an attack reconstructed a victim (see `cells`), and this is no coincidence: its guesses are closer
  to their victims than to decoys (identification), or one of them is exact.
- **identified**: no victim was reconstructed, but the guesses are closer to their victims than to decoys.
- **labels-read**: neither, but an attack that was not given the labels read more of them than a guess would.
- **nothing-found**: none of these, by any attack that works without the defense, on so many victims that fewer than
  `confidence` of all victims are reconstructed, with 95 % confidence.
- **cannot-conclude**: none of these, and too few valid trials of the attacks, or of them without the defense.

Tests are exact for attacks that ignore the update, and corrected so that a run says more than nothing-found of such
attacks in at most 5 % of cases. Verdicts rest on valid trials alone (`Trial.fault`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from leaktight.audits.judge.cells import CellKey, CellTrials
from leaktight.audits.judge.reasons import count, faults, found, named, remedy, scores, share
from leaktight.audits.judge.statistics import clear_chance, holm, upper_bound, victims_needed
from leaktight.report.words import listed
from leaktight.results.schema import (
    ERROR,
    LEVELS,
    UNDEFENDED,
    AttackerVerdict,
    Level,
    Significance,
    Track,
    Trial,
    Verdict,
    Word,
    severity,
)

MOST = 0.5
"""The least share of reconstructed victims for an attack to count as working."""


@dataclass(frozen=True)
class Finding:
    """What one attack showed. advice: what to do if nothing can be concluded. victims: that the word rests on."""

    cell: CellTrials
    word: Word
    because: str
    advice: str = ""
    victims: int = 0

    @property
    def strength(self) -> tuple[int, float, float]:
        """For comparing attacks: the level, the share of victims that were reconstructed, the mean SSIM."""
        score = self.cell.interval("ssim")
        rate = self.cell.success_rate or 0.0
        return -severity(self.word), rate, -2.0 if score is None else score.mean


@dataclass(frozen=True)
class Panel:
    """All cells of a run, for judging them together.

    confidence: the share of victims that nothing-found has to stay below. looks: what chances are multiplied by: how
    often the rule of the run looks at the results before it ends, times a factor for earlier_looks, which are those at
    summaries of fewer trials (`looks_factor`). cut: whether the run's budget ended before its trials.
    """

    cells: Sequence[CellTrials]
    confidence: float
    looks: int = 1
    earlier_looks: int = 0
    cut: bool = False
    attacks: Sequence[CellTrials] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attacks", [cell for cell in self.cells if cell.role == "attack"])

    @cached_property
    def _by_key(self) -> dict[CellKey, CellTrials]:
        return {cell.key: cell for cell in self.attacks}

    def cell(self, key: CellKey) -> CellTrials:
        """The attack cell of this key."""
        return self._by_key[key]

    @cached_property
    def identification(self) -> dict[CellKey, Significance]:
        return self._tests["identification"]

    @cached_property
    def label_reading(self) -> dict[CellKey, Significance]:
        return self._tests["labels"]

    @cached_property
    def _tests(self) -> dict[str, dict[CellKey, Significance]]:
        tests: dict[str, dict[CellKey, Significance]] = {"identification": {}, "labels": {}}
        corrected = holm([chance for *_, chance in self._chances])
        for (kind, cell, chance), own in zip(self._chances, corrected, strict=True):
            whole = min(1.0, self.looks * own)
            tests[kind][cell.key] = Significance(victims=len(cell.victims), chance=chance, corrected=whole)
        return tests

    @cached_property
    def _chances(self) -> list[tuple[str, CellTrials, float]]:
        """Every test of the run, in all tracks."""
        return [
            (kind, cell, chance)
            for cell in self.attacks
            for kind, chance in (("identification", cell.identification), ("labels", cell.label_reading))
            if chance is not None
        ]

    def level(self, cell: CellTrials) -> Level | None:
        """What the attack gets from the updates; None for nothing."""
        identified = self._passed(self.identification, cell)
        if cell.reconstructed and (identified or cell.exact):
            return "reconstructed"
        if identified:
            return "identified"
        return "labels-read" if self._passed(self.label_reading, cell) else None

    def _passed(self, tests: Mapping[CellKey, Significance], cell: CellTrials) -> bool:
        return cell.key in tests and tests[cell.key].passed

    def works(self, cell: CellTrials | None) -> bool:
        """Whether an attack on undefended updates can serve as a positive control.

        It reconstructs at least half of the victims, or identifies them so clearly that the same attack on unchanged
        updates would fail to in at most 5 % of cases.
        """
        if cell is None:
            return False
        if self.level(cell) == "reconstructed" and (cell.success_rate or 0) >= MOST:
            return True
        test = self.identification.get(cell.key)
        tests = len(self._chances) * self.looks
        return test is not None and test.chance <= clear_chance(ERROR / tests)

    def positive_control(self, cell: CellTrials) -> CellTrials | None:
        """The same attack on undefended updates; for undefended updates of production, on diagnostic ones."""
        if cell.defense != UNDEFENDED:
            return self._by_key.get(cell.key._replace(defense=UNDEFENDED, adaptive=False))
        return self._by_key.get(cell.key._replace(track="diagnostic")) if cell.track == "production" else None

    @property
    def needed(self) -> int:
        """The victims that nothing-found needs."""
        return victims_needed(self.confidence)

    def finding(self, cell: CellTrials) -> Finding:
        """What an attack showed about its defense."""
        level = self.level(cell)
        if level is not None:
            test = (self.label_reading if level == "labels-read" else self.identification).get(cell.key)
            return Finding(cell, level, found(level, cell, test), victims=len(cell.victims))
        control = self.positive_control(cell)
        shared = _shared(cell, control)
        reason, advice = self._doubt(cell, control, shared)
        if reason:
            return Finding(cell, "cannot-conclude", f"{named(cell)} {reason}.", f"{advice}.", len(shared))
        return Finding(cell, "nothing-found", self._nothing([cell], len(shared)), victims=len(shared))

    def _doubt(self, cell: CellTrials, control: CellTrials | None, shared: Sequence[int]) -> tuple[str, str]:
        """Why "found nothing" proves nothing, and what to do; two empty strings if it is proven."""
        if not cell.valid:
            return f"has no valid trial: {faults(cell)}", remedy(cell)
        if cell.reconstructed:
            return f"seems to reconstruct {share(cell)}, which may be chance", "Set more --trials"
        nothing = f"found nothing on {count(cell)}"
        asked = f"{self.needed} are needed to claim fewer than {100 * self.confidence:.0f} %"
        if self.cut and len(shared) < self.needed:
            return f"{nothing} when the budget was spent; {asked}", "Raise --budget, and continue with --resume"
        if not self.works(control):
            if cell.defense == UNDEFENDED:
                return (
                    f"{nothing}, though there is no defense: {scores(cell)}",
                    "Use a stronger attack or an easier update",
                )
            worked = "was not run" if control is None else f"reconstructs {share(control)}"
            return f"{nothing}, but without the defense it {worked}", "Use a stronger attack or an easier update"
        lost = sum(trial.fault is not None or not _acted(trial) for trial in cell.trials)
        if len(shared) >= self.needed and lost <= self.confidence * len(cell.trials):
            return "", ""
        if len(shared) >= self.needed:
            asked = f"at most {100 * self.confidence:.0f} % may be lost, as they may be those who leak"
        unchanged = sum(trial.update_changed is False for trial in cell.valid)
        if unchanged:
            return (
                f"{nothing}, but the defense left the update unchanged in {unchanged} of {len(cell.valid)} trials",
                "Raise its strength, or attack a round in which it acts",
            )
        broken = next((each for each in (cell, control) if each is not None and each.faults), None)
        if broken is not None:
            whose = "" if broken is cell else " without the defense"
            return f"{nothing}, but trials{whose} are not valid: {faults(broken)}; {asked}", remedy(broken)
        tried = len({trial.trial for trial in cell.valid})
        if tried >= self.needed:
            return (
                f"{nothing}, since some of its {tried} trials attacked the same examples; {asked}",
                "Set more --trials, attack more clients, or ask for less with --confidence",
            )
        return f"{nothing}; {asked}", f"Set --trials {self.needed}, or ask for less with --confidence"

    def _nothing(self, cells: Sequence[CellTrials], victims: int) -> str:
        """That these attacks found nothing; the scores of the first."""
        where = "on diagnostic updates" if cells[0].defense == UNDEFENDED else "without the defense"
        whose = "" if len(cells) == 1 else f" by {named(cells[0])}"
        tested = all(cell.identification is not None for cell in cells)
        untested = "" if tested else "; identification was not tested, for want of images of the same classes"
        control = self.positive_control(cells[0])
        works = "identifies" if control is not None and self.level(control) == "identified" else "reconstructs"
        shown = count(control) if control is not None and works == "identifies" else share(control)
        return (
            f"{listed(named(cell) for cell in cells)} reconstructed {'and identified ' if tested else ''}none of "
            f"{victims} victims (so with 95 % confidence fewer than {100 * upper_bound(0, victims):.0f} % of all would "
            f"be reconstructed): {scores(cells[0])}{whose}; {where} it {works} {shown}{untested}."
        )

    def verdicts(self) -> list[Verdict]:
        """One verdict for each defense in each track."""
        keys = dict.fromkeys((cell.track, cell.defense) for cell in self.attacks)
        return [self.verdict(track, defense) for track, defense in keys]

    def verdict(self, track: Track, defense: str) -> Verdict:
        """The worst that any attack found."""
        cells = [cell for cell in self.attacks if (cell.track, cell.defense) == (track, defense)]
        findings = sorted((self.finding(cell) for cell in cells), key=lambda each: each.strength, reverse=True)
        lead = self._lead(findings)
        shown = lead.cell.evidence
        return Verdict(
            defense=defense,
            track=track,
            threat=lead.cell.threat,
            verdict=lead.word,
            because=lead.because,
            advice=lead.advice,
            victims=lead.victims,
            below=upper_bound(0, lead.victims) if lead.word == "nothing-found" else None,
            worst_attack=lead.cell.attack,
            trial_id=None if shown is None else shown[0].id,
            example=None if shown is None else shown[1],
            attackers=tuple(_attacker(each) for each in findings),
        )

    def _lead(self, findings: Sequence[Finding]) -> Finding:
        """The finding that the verdict follows: a leak; else a doubt about an attack that works; else nothing-found."""
        if findings[0].word in LEVELS:
            return findings[0]
        able = [each for each in findings if each.cell.reconstructed or self.works(self.positive_control(each.cell))]
        doubtful = [each for each in able or findings if each.word == "cannot-conclude"]
        if doubtful:
            first, others = doubtful[0], doubtful[1:]
            more = (
                f" Nor can anything be concluded from {listed(named(each.cell) for each in others)}." if others else ""
            )
            return replace(first, because=first.because + more)
        fewest = min(each.victims for each in able)
        because = self._nothing([each.cell for each in able], fewest)
        return Finding(able[0].cell, "nothing-found", because, victims=fewest)


def _attacker(finding: Finding) -> AttackerVerdict:
    cell = finding.cell
    return AttackerVerdict(
        attack=cell.attack,
        adaptive=cell.adaptive,
        threat=cell.threat,
        verdict=finding.word,
        because=f"{finding.because} {finding.advice}".strip(),
        victims=len(cell.victims),
        reconstructed=len(cell.reconstructed),
    )


def _shared(cell: CellTrials, control: CellTrials | None) -> list[int]:
    """The victims with a valid trial of the attack, on an update that the defense changed, and of its control."""
    if control is None:
        return []

    def place(trial: Trial) -> tuple[int, int]:
        return trial.trial, trial.round if cell.track == control.track else 0  # tracks attack different rounds

    proven = {place(trial) for trial in control.valid}
    return [
        group[0].trial for group in cell.victims if any(_acted(trial) and place(trial) in proven for trial in group)
    ]


def _acted(trial: Trial) -> bool:
    """Whether the defense, if there is one, changed the update."""
    return trial.defense == UNDEFENDED or trial.update_changed is not False
