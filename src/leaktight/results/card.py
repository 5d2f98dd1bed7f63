"""The cards of the leaderboard: one JSON file for each defense in each setting, sealed by its own digest.

A card holds what all attackers found, the accuracy and the cost of the defense, what was published about it, and the
configs and digests of the runs behind it. The digest shows that a card was changed after it was written; it is not a
signature.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from leaktight.core.errors import ResultsError, UsageError
from leaktight.core.files import slug, write_atomically
from leaktight.results.lines import canonical, hashed
from leaktight.results.schema import (
    LEVELS,
    UNDEFENDED,
    Figure,
    Plain,
    Record,
    Score,
    Threat,
    Track,
    Word,
    parse,
    severity,
)
from leaktight.results.store import read_file

CARD_VERSION = 1
_SHORT = 6
"""Digits of a hash in the name of a file."""


def _readable(version: int) -> int:
    if not 1 <= version <= CARD_VERSION:
        raise ValueError(f"expected a version from 1 to {CARD_VERSION}; update Leaktight")
    return version


class Setting(Record):
    """What was attacked, but for the defense. data, model, local: tables of the config. round: of the attacked update.

    threat: what an attacker knows who does not know the defense.
    """

    data: dict[str, Plain]
    model: dict[str, Plain]
    local: dict[str, Plain]
    num_examples: int | str
    batch_size: int | str
    local_steps: int | str
    round: int
    threat: Threat

    @property
    def name(self) -> str:
        """The name for files and readers; its end tells settings apart that differ in anything."""
        words = (self.data.get("kind"), self.model.get("kind"), self.model.get("init"))
        after = f"-r{self.round}" if self.round else ""
        text = f"{'-'.join(str(each) for each in words)}-b{self.batch_size}-s{self.local_steps}{after}"
        return f"{slug(text)}-{_short(self.document())}"


class Attacker(Record):
    """What one attacker found.

    victims: with a valid guess; faults: guesses that are not valid. psnr, ssim: over victims, the mean of a batch for
    each. worst: the PSNR of the closest guess of any example of any victim. scores: by trial, the PSNR of each example.
    reconstructed: how many victims were, by the rules of the judge; None if not judged. word: the verdict.
    run: the digest of its run. by, code: of a submission, who made it and where its code is; "" for a run.
    """

    attack: str
    adaptive: bool
    victims: int = Field(ge=0)
    faults: int = 0
    psnr: Score
    ssim: Score | None = None
    worst: Figure
    scores: dict[str, tuple[Figure, ...]] = Field(default_factory=dict)
    reconstructed: int | None = None
    word: Word | None = None
    run: str
    by: str = ""
    code: str = ""

    @property
    def name(self) -> tuple[str, bool, str]:
        """What tells attackers of a card apart."""
        return self.attack, self.adaptive, self.by


class Source(Record):
    """A run behind a card: its digest, its config as TOML, and its victims: the digest of their examples, by trial."""

    digest: str
    config: str
    victims: dict[str, str] = Field(default_factory=dict)


class Utility(Record):
    """What a defense costs: accuracy, seconds of a client's round and bytes that it sends, with it and without any.

    data: what was trained on. digest, config: of the run.
    """

    accuracy: Figure
    plain_accuracy: Figure
    seconds: Figure = None
    plain_seconds: Figure = None
    bytes_up: Figure = None
    plain_bytes_up: Figure = None
    data: str = ""
    digest: str
    config: str

    @property
    def kept(self) -> float | None:
        """The share of the accuracy without a defense that is left."""
        if self.accuracy is None or not self.plain_accuracy:
            return None
        return self.accuracy / self.plain_accuracy


class Claim(Record):
    """A published result. says: in a sentence. source: the paper, and the table or figure."""

    says: str
    source: str


class Card(Record):
    """One defense in one setting.

    word: the verdict, the worst over all attackers. blind: the PSNR of the closest guess without the update, over all
    victims. no_adaptive: why there is no attacker who knows the defense. digest: of all other fields.
    """

    schema_version: Annotated[int, AfterValidator(_readable)]
    defense: str
    defense_settings: dict[str, Plain] = Field(default_factory=dict)
    track: Track
    setting: Setting
    word: Word
    attackers: tuple[Attacker, ...]
    blind: Figure = None
    no_adaptive: str = ""
    utility: Utility | None = None
    claims: tuple[Claim, ...] = ()
    sources: tuple[Source, ...] = ()
    digest: str = ""

    @property
    def file(self) -> str:
        """Its path in the folder of the leaderboard. The end of the name tells settings of a defense apart."""
        return f"{self.track}/{self.setting.name}/{slug(self.defense)}-{_short(self.defense_settings)}.json"

    @property
    def method(self) -> tuple[str, bytes]:
        """The kind of the defense and its settings, the same in all settings; names may have settings in brackets."""
        return self.defense.partition("(")[0], canonical(self.defense_settings)

    @property
    def worst(self) -> float | None:
        """The PSNR of the closest guess by any attacker of any example."""
        return max((each.worst for each in self.attackers if each.worst is not None), default=None)

    def strongest(self, *, adaptive: bool) -> Attacker | None:
        """Of the attackers who know the defense, or of those who do not, the one with the closest guess."""
        own = [each for each in self.attackers if each.adaptive == adaptive and each.worst is not None and each.victims]
        return max(own, key=lambda each: each.worst or 0.0, default=None)

    def sealed(self) -> Self:
        """The card with its digest."""
        bare = {key: value for key, value in self.document().items() if key != "digest"}
        return self.model_copy(update={"digest": hashed(canonical(bare))})

    def joined(self, other: Card) -> Card:
        """This card with what another one adds; of the same attacker the closer guesses are kept."""
        found = {each.name: each for each in self.attackers}
        for each in other.attackers:
            rival = found.get(each.name)
            if rival is None or (each.worst or 0.0) >= (rival.worst or 0.0):
                found[each.name] = each
        attackers = tuple(found.values())
        used = {each.run for each in attackers}
        sources = {each.digest: each for each in (*self.sources, *other.sources) if each.digest in used}
        blinds = [each for each in (self.blind, other.blind) if each is not None]
        changes: dict[str, object] = {
            "attackers": attackers,
            "word": _joined_word(self.word, other.word),
            "blind": max(blinds, default=None),
            "no_adaptive": "" if any(each.adaptive for each in attackers) else other.no_adaptive or self.no_adaptive,
            "utility": other.utility or self.utility,
            "claims": other.claims or self.claims,
            "sources": tuple(sources.values()),
        }
        return self.model_copy(update=changes).sealed()


def read_card(file: Path) -> Card:
    """A card. Raises UsageError if it is not as it was written."""
    content = read_file(file)
    if content is None:
        raise UsageError(f"expected a card at {file}, got no file; check the path")
    card = parse(Card, content, str(file))
    if card.sealed().digest != card.digest:
        raise UsageError(
            f"{file} was changed after it was written: its digest is another; restore it, or make it again with "
            "leaktight leaderboard add"
        )
    return card


def read_cards(folder: Path) -> list[Card]:
    """All cards of a leaderboard, by track and setting. Raises an error that names the first bad one."""
    if not folder.is_dir():
        raise UsageError(f"expected the folder of a leaderboard, got {folder}; name one such as leaderboard")
    cards = []
    for file in sorted(folder.glob("*/*/*.json")):
        card = read_card(file)
        if file.relative_to(folder).as_posix() != card.file:
            raise ResultsError(f"{file}: expected the name {card.file} for what the card says; rename it")
        cards.append(card)
    if not cards:
        raise UsageError(f"{folder} has no cards; make some with leaktight leaderboard add RUN --to {folder}")
    return cards


def write_cards(folder: Path, cards: Iterable[Card]) -> list[Path]:
    """Write cards into the folder, joined with those that are there, and return their files."""
    files = []
    for card in cards:
        file = folder / card.file
        whole = read_card(file).joined(card) if file.exists() else card.sealed()
        write_atomically(file, json.dumps(whole.document(), indent=1) + "\n")
        files.append(file)
    return files


def with_utility(cards: Sequence[Card], measured: Sequence[Card]) -> list[Card]:
    """The cards, each with the cost that a measured card of the same defense and settings has; others unchanged."""
    known = {each.method: each.utility for each in measured if each.utility}
    return [card.model_copy(update={"utility": known.get(card.method, card.utility)}).sealed() for card in cards]


def is_reference(card: Card) -> bool:
    """Whether a card is that of the undefended federation."""
    return card.defense == UNDEFENDED


def _short(content: object) -> str:
    return hashed(canonical(content))[:_SHORT]


def _joined_word(*words: Word) -> Word:
    """The worst that was found; of runs that found nothing, one that could conclude counts."""
    found = [word for word in words if word in LEVELS]
    if found:
        return min(found, key=severity)
    return "nothing-found" if "nothing-found" in words else "cannot-conclude"
