"""Checks of an audit: reasons to doubt its figures. Each has a code, a condition and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from leaktight.audits.cells import CellTrials
from leaktight.audits.verdict import MIN_TRIALS, works
from leaktight.results.schema import UNDEFENDED, Flag, FlagPlace, Trial

FALLEN = 0.9
_EXACT = 1e-8


@dataclass(frozen=True)
class Finding:
    """Where a check was raised: a cell, a defense (attack None), or the whole run (both None). detail: the numbers."""

    detail: str
    attack: str | None = None
    defense: str | None = None
    adaptive: bool = False

    def concerns(self, cell: CellTrials) -> bool:
        """Whether the finding is about this cell, or about its whole defense."""
        if self.attack is None:
            return self.defense == cell.defense
        return (self.attack, self.defense, self.adaptive) == (cell.attack, cell.defense, cell.adaptive)


@dataclass(frozen=True)
class Evidence:
    """What the checks read. easier: how the attacked updates are easier than those of training, or None."""

    cells: Sequence[CellTrials]
    easier: str | None = None

    @property
    def attacks(self) -> list[CellTrials]:
        return [cell for cell in self.cells if cell.role == "attack"]

    @property
    def undefended(self) -> list[CellTrials]:
        return [cell for cell in self.attacks if cell.defense == UNDEFENDED and cell.done]

    @property
    def defenses(self) -> list[str]:
        return [name for name in dict.fromkeys(cell.defense for cell in self.cells) if name != UNDEFENDED]


@dataclass(frozen=True)
class Check:
    """A reason for doubt. find: yields where the condition holds."""

    code: str
    raised_if: str
    advice: str
    find: Callable[[Evidence], Iterator[Finding]]


@dataclass(frozen=True)
class Raised:
    """A check that was raised, and where."""

    check: Check
    finding: Finding

    @property
    def flag(self) -> Flag:
        finding = self.finding
        return Flag(
            code=self.check.code,
            cell=None if finding.defense is None else FlagPlace(attack=finding.attack, defense=finding.defense),
            raised_if=self.check.raised_if,
            advice=self.check.advice,
            detail=finding.detail,
        )


def raise_flags(evidence: Evidence) -> list[Raised]:
    return [Raised(check, finding) for check in CHECKS for finding in check.find(evidence)]


def _weak_attack(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.undefended:
        if not works(cell):
            yield _at(cell, f"{len(cell.leaked)} of {len(cell.done)} victims reconstructed without a defense")


def _control_not_beaten(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.undefended:
        gains = {metric: cell.gain(metric) for metric in ("ssim", "psnr")}
        known = {metric: gain for metric, gain in gains.items() if gain is not None}
        if known and all(gain.mean <= 0 for gain in known.values()):
            shown = ", ".join(f"{metric} {gain.mean:+.2f}" for metric, gain in known.items())
            yield _at(cell, f"against the best guess without the update: {shown}")


def _unchanged(evidence: Evidence) -> Iterator[Finding]:
    for defense in evidence.defenses:
        done = [trial for cell in evidence.cells if cell.defense == defense for trial in cell.done]
        same = {(trial.trial, trial.round) for trial in done if trial.update_changed is False}
        if same:
            tried = len({(trial.trial, trial.round) for trial in done})
            yield Finding(f"in {len(same)} of {tried} updates", defense=defense)


def _loss_stuck(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        stuck = [trial for trial in cell.done if _is_stuck(trial)]
        if 2 * len(stuck) > len(cell.done):
            yield _at(cell, f"in {len(stuck)} of {len(cell.done)} trials")


def _is_stuck(trial: Trial) -> bool:
    first, last = trial.first_loss, trial.loss
    return first is not None and last is not None and abs(first) > _EXACT and last > FALLEN * first


def _not_finite(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        broken = [trial for trial in cell.done if trial.loss is None or _missing(trial)]
        if broken:
            yield _at(cell, f"in {len(broken)} of {len(cell.done)} trials")


def _missing(trial: Trial) -> bool:
    return any(score is None for scores in trial.scores.values() if scores is not None for score in scores)


def _too_few(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        if 0 < len(cell.done) < MIN_TRIALS:
            yield _at(cell, f"{len(cell.done)} finished")


def _failed(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.cells:
        failed = [trial for trial in cell.trials if trial.status == "failed"]
        if failed:
            yield _at(cell, f"{len(failed)} of {len(cell.trials)}: {failed[0].error}")


def _no_control(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        if cell.done and cell.control("ssim") is None:
            yield _at(cell, "no control was finished on these victims")


def _not_adaptive(evidence: Evidence) -> Iterator[Finding]:
    for defense in evidence.defenses:
        if not any(cell.adaptive and cell.done for cell in evidence.attacks if cell.defense == defense):
            yield Finding("all attackers behaved as if there were no defense", defense=defense)


def _easier(evidence: Evidence) -> Iterator[Finding]:
    if evidence.easier is not None:
        yield Finding(evidence.easier)


def _at(cell: CellTrials, detail: str) -> Finding:
    return Finding(detail, cell.attack, cell.defense, cell.adaptive)


CHECKS: Sequence[Check] = (
    Check(
        "attack-failed-undefended",
        "an attack reconstructs fewer than half of the undefended victims",
        "its failure against a defense proves nothing; give it more iterations or restarts, or an easier update",
        _weak_attack,
    ),
    Check(
        "control-not-beaten",
        "on average an attack on undefended updates is no better than a guess that ignores the update",
        "the scores of this attack mean nothing here; give it more iterations, or leave it out",
        _control_not_beaten,
    ),
    Check(
        "update-unchanged",
        "a defense sent exactly the update that the client would have sent without it",
        "the defense did not act in these rounds; raise its strength, or attack a round in which it acts",
        _unchanged,
    ),
    Check(
        "loss-did-not-fall",
        "in most trials the attack's own loss fell by less than a tenth",
        "the search failed, and the guesses are the initial ones; change the step size, or allow more iterations",
        _loss_stuck,
    ),
    Check(
        "not-finite",
        "a loss or a score is not a finite number",
        'the attack diverged; lower its step size, or use precision = "float64"',
        _not_finite,
    ),
    Check(
        "too-few-trials",
        f"fewer than {MIN_TRIALS} trials of an attack on a defense were finished",
        "means and intervals of so few victims are unreliable; raise --trials",
        _too_few,
    ),
    Check(
        "trials-failed",
        "trials of an attack on a defense ended in an error",
        "the figures leave these trials out; read the error; the threat model may lack what the attack needs",
        _failed,
    ),
    Check(
        "no-control",
        "an attack has no negative control on the same victims",
        "its scores may come from prior knowledge alone; keep the controls in the run",
        _no_control,
    ),
    Check(
        "no-adaptive-attacker",
        "no attacker who knows the defense was tried against it",
        "attackers can be expected to know the defense; run an adaptive attack, see docs/audit.md",
        _not_adaptive,
    ),
    Check(
        "easier-than-training",
        "the attacked updates come from less local training than [local] sets",
        "read the figures as an upper bound for the real updates; to attack those, leave out [audit.local]",
        _easier,
    ),
)
