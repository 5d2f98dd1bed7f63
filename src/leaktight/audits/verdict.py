"""The verdict on a defense: one of four words, and the reason in a sentence.

- **leaks**: one attack reconstructed at least half of its victims.
- **partly**: an attack reconstructed some of them, or came clearly closer to all of them than the controls (the 95 %
  interval of the gain lies above 0.1 SSIM or 3 dB), or read over 70 % of the labels, which it was not given.
- **not-found**: none of this, though one of the attacks reconstructs at least half of the victims without a defense
  and was tried on at least three of them.
- **cannot-conclude**: none of this, and no attack works even without a defense, or fewer than three trials were run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaktight.audits.cells import CellTrials, upper_bound
from leaktight.report.words import listed
from leaktight.results.schema import UNDEFENDED, Threat, Verdict, Word

MOST = 0.5
MIN_TRIALS = 3
CLEAR_GAIN: Mapping[str, float] = {"ssim": 0.1, "psnr": 3.0}
CLEAR_LABELS = 0.7


def verdicts(cells: Sequence[CellTrials]) -> list[Verdict]:
    """One verdict for each defense and each threat model. Who knows more can run the others' attacks too."""
    attacks = [cell for cell in cells if cell.role == "attack"]
    found = []
    for defense in dict.fromkeys(cell.defense for cell in attacks):
        for threat in dict.fromkeys(cell.threat for cell in attacks if cell.defense == defense):
            able = [cell for cell in attacks if _within(cell.threat, threat)]
            own = [cell for cell in able if cell.defense == defense]
            undefended = {cell.attack: cell for cell in able if cell.defense == UNDEFENDED}
            found.append(judge_defense(defense, threat, own, undefended))
    return found


def judge_defense(
    defense: str, threat: Threat, own: Sequence[CellTrials], undefended: Mapping[str, CellTrials]
) -> Verdict:
    """The verdict on one defense. own: the attacks on it. undefended: the same attacks without it, by name."""
    done = [cell for cell in own if cell.done]
    worst = max(done, key=_strength, default=None)
    word: Word = "cannot-conclude"
    because = f"every trial failed: {_first_error(own)}."
    if worst is not None:
        word, because = _weigh(worst, done, undefended)
    return Verdict(
        defense=defense,
        threat=threat,
        verdict=word,
        because=because,
        worst_attack=None if worst is None else worst.attack,
        trial_id=None if worst is None else worst.most_leaking(),
    )


def works(cell: CellTrials | None) -> bool:
    """Whether an attack reconstructs at least half of its victims."""
    return cell is not None and (cell.success_rate or 0) >= MOST


def _weigh(worst: CellTrials, done: Sequence[CellTrials], undefended: Mapping[str, CellTrials]) -> tuple[Word, str]:
    if worst.leaked:
        word: Word = "leaks" if works(worst) else "partly"
        return word, f"{worst.attack} reconstructed {_victims(worst)}: {_scores(worst)}."
    for cell in sorted(done, key=_strength, reverse=True):
        if (reason := _traces(cell)) is not None:
            return "partly", f"no victim was reconstructed, but {reason}."
    names = listed(dict.fromkeys(cell.attack for cell in done))
    proven = [cell for cell in done if works(undefended.get(cell.attack))]
    if not proven:
        return "cannot-conclude", (
            f"{names} reconstructed nothing, but none of them reconstructs half of the victims even without a "
            f"defense: {_scores(worst)}. Use stronger attacks or an easier update."
        )
    tried = max(len(cell.done) for cell in proven)
    if tried < MIN_TRIALS:
        return "cannot-conclude", f"{names} reconstructed nothing, but {tried} of {MIN_TRIALS} needed trials were run."
    best = max((undefended[cell.attack] for cell in proven), key=_strength)
    return "not-found", (
        f"{names} reconstructed none of {tried} victims (so with 95 % confidence they reconstruct fewer than "
        f"{100 * upper_bound(0, tried):.0f} % of all): {_scores(worst)} by {worst.attack}; without a defense "
        f"{best.attack} reconstructed {_victims(best)}."
    )


def _traces(cell: CellTrials) -> str | None:
    """What an attack learnt from the updates without a reconstruction, in words; None if nothing."""
    for metric, least in CLEAR_GAIN.items():
        gain = cell.gain(metric)
        if gain is not None and len(cell.done) >= MIN_TRIALS and gain.low > least:
            return f"{cell.attack} came closer than guesses without the update: {_scores(cell)}"
    labels = cell.label_accuracy()
    blind = "labels" not in cell.threat.knows
    if labels is not None and blind and len(cell.done) >= MIN_TRIALS and labels.low > CLEAR_LABELS:
        return f"{cell.attack} read {100 * labels.mean:.0f} % of the labels from the updates"
    return None


def _scores(cell: CellTrials) -> str:
    """Mean SSIM and PSNR, with those of the controls."""
    parts = []
    for metric, form in (("SSIM", "{:z.2f}"), ("PSNR", "{:z.1f} dB")):
        score, control = cell.interval(metric.lower()), cell.control(metric.lower())
        if score is not None:
            beside = "" if control is None else f" (without the update {form.format(control)})"
            parts.append(f"{metric} {form.format(score.mean)} on average{beside}")
    return ", ".join(parts) or "no score is finite"


def _victims(cell: CellTrials) -> str:
    return f"{len(cell.leaked)} of {len(cell.done)} victims"


def _strength(cell: CellTrials) -> tuple[float, float]:
    score = cell.interval("ssim")
    return cell.success_rate or 0.0, -2.0 if score is None else score.mean


def _within(threat: Threat, other: Threat) -> bool:
    """Whether the attacker of `other` can do all that the attacker of `threat` can."""
    same = threat.sees == other.sees and threat.server in (other.server, "curious")
    return same and set(threat.knows) <= set(other.knows)


def _first_error(cells: Sequence[CellTrials]) -> str:
    return next((trial.error.rstrip(".") for cell in cells for trial in cell.trials if trial.error), "no reason")
