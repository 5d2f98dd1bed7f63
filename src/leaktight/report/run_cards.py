"""Cards of the leaderboard from the result files of a finished run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from leaktight.core.errors import ResultsError, UsageError
from leaktight.core.reading import parse_toml
from leaktight.report.runs import Run, load_run
from leaktight.results.card import CARD_VERSION, Attacker, Card, Claim, Setting, Source, Utility
from leaktight.results.schema import UNDEFENDED, VARIES, Cell, Score, Track, TradeoffRow, Trial, Verdict, Word
from leaktight.results.verify import verify

NO_ADAPTIVE = "no adaptive attacker here: "
"""How the detail of a flag begins that says why a defense has no attacker who knows it."""


def cards_of_run(folder: Path) -> list[Card]:
    """A card for each defense and track of a finished audit or trade-off. Raises UsageError if its digest is another.

    A defense on which every attack ended in an error has none.
    A trade-off gives the cards of its diagnostic track the accuracy and the cost of the defense.
    """
    found = verify(folder)
    if found.differences:
        raise UsageError(f"{folder} was changed after it was written: {found.differences[0]}; run it again")
    run = load_run(folder)
    if "inspect" in _config(run):
        raise UsageError(f"{folder} is an inspection of one update; name the folder of an audit or a trade-off")
    if not any(cell.role == "attack" for cell in run.summary.cells) or not run.summary.verdicts:
        raise UsageError(f"{folder} has no verdicts of attacks on defenses; name the folder of an audit or a trade-off")
    tried = {(each.track, each.defense) for each in run.trials if each.role == "attack" and each.status == "done"}
    if not tried:
        raise UsageError(f"every attack of {folder} ended in an error; see its report, and run it again")
    entries = [each for each in run.summary.verdicts if (each.track, each.defense) in tried]
    return [_card(run, entry, found.digest) for entry in entries]


def _card(run: Run, verdict: Verdict, digest: str) -> Card:
    own = [each for each in run.trials if each.track == verdict.track and each.defense == verdict.defense]
    cells = [each for each in run.summary.cells if each.track == verdict.track and each.defense == verdict.defense]
    attacks = [trial for trial in own if trial.role == "attack"]
    controls = [trial for trial in own if trial.role == "control"]
    naive = [trial for trial in attacks if not trial.adaptive] or attacks
    shown = {trial.id: trial for trial in attacks}
    words = {(each.attack, each.adaptive): each.verdict for each in verdict.attackers}
    attackers = [
        attacker_of(
            cell,
            [shown[name] for name in cell.trial_ids if name in shown],
            word=words.get((cell.attack, cell.adaptive)),
            run=digest,
        )
        for cell in cells
        if cell.role == "attack"
    ]
    victims = {_place(trial): trial.examples for trial in naive if trial.examples is not None}
    settings = attacks[0].defense_settings
    card = Card(
        schema_version=CARD_VERSION,
        defense=verdict.defense,
        defense_settings=settings,
        track=verdict.track,
        setting=_setting(run, naive, verdict.track),
        word=verdict.verdict,
        attackers=tuple(attackers),
        blind=_most(score for trial in controls for score in trial.scores.get("psnr") or ()),
        no_adaptive=_no_adaptive(run, verdict.defense) if not any(each.adaptive for each in attackers) else "",
        claims=claims_of(verdict.defense),
        sources=(Source(digest=digest, config=run.config, victims=victims),),
    )
    utility = _utility(run, verdict.defense, digest) if verdict.track == "diagnostic" else None
    return (card.model_copy(update={"utility": utility}) if utility else card).sealed()


def attacker_of(cell: Cell, trials: Sequence[Trial], *, word: Word | None, run: str) -> Attacker:
    """What one attacker found. trials: of its cell. word: its verdict. run: the digest of its run."""
    valid = [trial for trial in trials if trial.fault is None]
    scores = {_place(trial): tuple(trial.scores.get("psnr") or ()) for trial in valid}
    return Attacker(
        attack=cell.attack,
        adaptive=cell.adaptive,
        victims=cell.judged,
        faults=len(trials) - len(valid),
        psnr=cell.scores.get("psnr") or Score(mean=None),
        ssim=cell.scores.get("ssim"),
        worst=_most(score for each in scores.values() for score in each),
        scores=scores,
        reconstructed=cell.reconstructed,
        word=word,
        run=run,
    )


def _config(run: Run) -> dict[str, Any]:
    return parse_toml(run.config, run.path / "config.toml", ResultsError)


def _setting(run: Run, trials: Sequence[Trial], track: Track) -> Setting:
    config = _config(run)
    tables = config.get("production", config) if track == "production" else config
    local = tables.get("audit", {}).get("local") or tables.get("local", {})
    data = {key: value for key, value in tables.get("data", {}).items() if key != "root"}
    facts = [trial.ledger for trial in trials if trial.ledger.batch_size is not None]
    if not facts or not data:
        raise UsageError(f"{run.path}: expected a config and finished trials on {trials[0].defense}; run it again")
    return Setting(
        data=data,
        model=tables.get("model", {}),
        local=local,
        num_examples=_common([each.num_examples for each in facts]),
        batch_size=_common([each.batch_size for each in facts]),
        local_steps=_common([each.local_steps for each in facts]),
        round=min(trial.round for trial in trials),
        threat=trials[0].threat,
    )


def _utility(run: Run, defense: str, digest: str) -> Utility | None:
    rows = {row.defense: row for row in run.summary.tradeoff.rows} if run.summary.tradeoff else {}
    row, plain = rows.get(defense), rows.get(UNDEFENDED)
    if row is None or plain is None:
        return None
    return _cost(row, plain, str(run.summary.scenario.get("data", "")), digest, run.config)


def _cost(row: TradeoffRow, plain: TradeoffRow, data: str, digest: str, config: str) -> Utility:
    return Utility(
        accuracy=row.accuracy,
        plain_accuracy=plain.accuracy,
        seconds=row.client_seconds,
        plain_seconds=plain.client_seconds,
        bytes_up=row.client_bytes,
        plain_bytes_up=plain.client_bytes,
        data=data,
        digest=digest,
        config=config,
    )


def _no_adaptive(run: Run, defense: str) -> str:
    """Why no attacker knows the defense, as the run says it; empty if it does not say."""
    details = [flag.detail for flag in run.summary.flags if flag.cell and flag.cell.defense == defense]
    return next((each.removeprefix(NO_ADAPTIVE) for each in details if each.startswith(NO_ADAPTIVE)), "")


def claims_of(defense: str) -> tuple[Claim, ...]:
    """What was published about a defense of the catalogue; a name may have settings in brackets."""
    return _claims().get(defense.partition("(")[0], ())


@cache
def _claims() -> Mapping[str, tuple[Claim, ...]]:
    content = tomllib.loads(files("leaktight.report").joinpath("claims.toml").read_text(encoding="utf-8"))
    return {name: tuple(Claim.model_validate(each) for each in entries) for name, entries in content.items()}


def _place(trial: Trial) -> str:
    """The name of a victim in cards: its trial, and its round after the first."""
    return f"t{trial.trial:03d}.r{trial.round:03d}" if trial.round else f"t{trial.trial:03d}"


def _common(values: Sequence[int | str | None]) -> int | str:
    """The value that all trials share, or "varies"."""
    first = values[0]
    return first if first is not None and all(each == first for each in values) else VARIES


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
