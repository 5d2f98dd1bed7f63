"""Checks of an audit: reasons to doubt its figures. Each has a code, a condition and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leaktight.audits.judge.cells import CellTrials
from leaktight.audits.judge.recommend import LEARNED
from leaktight.audits.judge.statistics import looks_factor
from leaktight.audits.judge.verdict import Panel
from leaktight.report.words import counted, defense_words, listed, metric_words, percent, signed, span
from leaktight.results.schema import UNDEFENDED, Flag, FlagPlace, Track, Tradeoff

MIN_TRIALS = 3
FEW_DECOYS = 19

_ALL_NAIVE = "all attackers behaved as if there were no defense"


@dataclass(frozen=True)
class Finding:
    """Where a check was raised: a cell, a defense (attack None), or the whole run (both None). detail: the numbers."""

    detail: str
    attack: str | None = None
    defense: str | None = None
    adaptive: bool = False
    track: Track = "diagnostic"

    def concerns(self, cell: CellTrials) -> bool:
        """Whether the finding is about this cell, or about its whole defense."""
        if self.attack is None:
            return (self.track, self.defense) == (cell.track, cell.defense)
        return (self.track, self.defense, self.attack, self.adaptive) == cell.key


@dataclass(frozen=True)
class Evidence:
    """What the checks read.

    easier: how the attacked updates are easier than those of training, or None. helpless: by track and defense, why
    there is no attacker who knows the defense. weighed: of a trade-off, accuracy and cost.
    """

    panel: Panel
    easier: str | None = None
    helpless: Mapping[tuple[Track, str], str] = field(default_factory=dict)
    weighed: Tradeoff | None = None

    @property
    def cells(self) -> Sequence[CellTrials]:
        return self.panel.cells

    @property
    def attacks(self) -> Sequence[CellTrials]:
        return self.panel.attacks

    @property
    def undefended(self) -> list[CellTrials]:
        return [cell for cell in self.attacks if cell.defense == UNDEFENDED and cell.done]

    @property
    def defenses(self) -> list[tuple[Track, str]]:
        found = dict.fromkeys((cell.track, cell.defense) for cell in self.cells)
        return [(track, name) for track, name in found if name != UNDEFENDED]

    def of(self, track: Track, defense: str) -> list[CellTrials]:
        """The cells of a defense."""
        return [cell for cell in self.cells if (cell.track, cell.defense) == (track, defense)]


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
        if not evidence.panel.works(cell):
            yield _at(cell, f"{len(cell.reconstructed)} of {len(cell.victims)} victims reconstructed without a defense")


def _control_not_beaten(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.undefended:
        gains = {metric: cell.gain(metric) for metric in ("ssim", "psnr")}
        known = {metric: gain for metric, gain in gains.items() if gain is not None}
        if known and evidence.panel.level(cell) is None and all(gain <= 0 for gain in known.values()):
            shown = ", ".join(
                f"{metric_words(metric).label} {signed(gain, metric, unit=True)}" for metric, gain in known.items()
            )
            yield _at(cell, f"against the best guess without the update: {shown}")


def _near_chance(evidence: Evidence) -> Iterator[Finding]:
    weighed = evidence.weighed
    if weighed is None or weighed.chance is None:
        return
    low = [
        f"{defense_words(row.defense)} {percent(row.accuracy)} ({span(row.accuracy_ci95, percent)})"
        for row in weighed.rows
        if row.learned is False
    ]
    if low:
        yield Finding(f"{listed(low)}; by chance {percent(weighed.chance)}, on {weighed.examples} examples")


def _unchanged(evidence: Evidence) -> Iterator[Finding]:
    for track, defense in evidence.defenses:
        done = [trial for cell in evidence.of(track, defense) for trial in cell.done]
        same = {(trial.trial, trial.round) for trial in done if trial.update_changed is False}
        if same:
            tried = len({(trial.trial, trial.round) for trial in done})
            yield Finding(f"in {len(same)} of {tried} updates", defense=defense, track=track)


def _loss_stuck(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        stuck = [trial for trial in cell.done if trial.stuck]
        if stuck:
            yield _at(cell, f"in {len(stuck)} of {len(cell.done)} trials")


def _not_finite(evidence: Evidence) -> Iterator[Finding]:
    for cell in evidence.attacks:
        if broken := cell.faults["gave values that are not finite"]:
            yield _at(cell, f"in {broken} of {len(cell.done)} trials")


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
        if cell.valid and cell.control("ssim") is None:
            yield _at(cell, "no control was finished on these victims")


def _not_adaptive(evidence: Evidence) -> Iterator[Finding]:
    for track, defense in evidence.defenses:
        if not any(cell.adaptive and cell.valid for cell in evidence.of(track, defense)):
            reason = evidence.helpless.get((track, defense))
            detail = f"no adaptive attacker here: {reason}" if reason else _ALL_NAIVE
            yield Finding(detail, defense=defense, track=track)


def _few_decoys(evidence: Evidence) -> Iterator[Finding]:
    ranks = [trial.rank for cell in evidence.attacks for trial in cell.valid]
    fewest = min((0 if rank is None else rank.decoys for rank in ranks), default=FEW_DECOYS)
    if fewest < FEW_DECOYS:
        yield Finding(f"{fewest} decoys for one of the victims")


def _grown(evidence: Evidence) -> Iterator[Finding]:
    earlier = evidence.panel.earlier_looks
    if earlier:
        yield Finding(f"{counted(earlier, 'earlier look')}; chances are multiplied by {looks_factor(earlier)}")


def _easier(evidence: Evidence) -> Iterator[Finding]:
    if evidence.easier is not None:
        yield Finding(evidence.easier)


def _at(cell: CellTrials, detail: str) -> Finding:
    return Finding(detail, cell.attack, cell.defense, cell.adaptive, cell.track)


CHECKS: Sequence[Check] = (
    Check(
        "attack-failed-undefended",
        "an attack neither reconstructs half of the undefended victims nor identifies them clearly",
        "its failure against a defense proves nothing; give it more iterations or restarts, or an easier update",
        _weak_attack,
    ),
    Check(
        "control-not-beaten",
        "an attack on undefended updates finds nothing, on average no more than a guess that ignores the update",
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
        "the attack's own loss fell by less than a hundredth in a trial, which is not valid",
        "the search failed, and the guess is the initial one; change the step size, or allow more iterations",
        _loss_stuck,
    ),
    Check(
        "not-finite",
        "a loss or a score is not a finite number; the trial is not valid",
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
        "the figures leave these trials out; read the error; the threat model may lack what the attack needs; "
        "--resume --retry-failed repeats them",
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
        "attackers can be expected to know the defense; run an adaptive attack, see `leaktight docs audit`",
        _not_adaptive,
    ),
    Check(
        "few-decoys",
        f"fewer than {FEW_DECOYS} decoys were there for a victim",
        "a few victims are hardly identified among so few; use smaller batches or a larger data set",
        _few_decoys,
    ),
    Check(
        "grown-after-a-look",
        "the run went on after a summary of fewer trials was there to be seen",
        "whoever goes on until a leak shows will see one by chance, so chances are corrected; nothing-found needs no "
        "correction; see `leaktight docs verdicts`",
        _grown,
    ),
    Check(
        "easier-than-training",
        "the attacked updates come from less local training than [local] sets",
        "read the figures as an upper bound for the real updates; to attack those, leave out [audit.local]",
        _easier,
    ),
    Check(
        "accuracy-near-chance",
        "the 95 % interval of a trained model's accuracy is not above that of always naming the largest class, by at "
        f"least {100 * LEARNED:.0f} % of what is left to 100 %",
        "a model that has not learned shows nothing of what a defense costs; train longer, or with another learning "
        "rate",
        _near_chance,
    ),
)
