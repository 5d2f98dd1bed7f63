"""`leaktight leaderboard`: cards from runs, updates of published victims, and guesses for them from elsewhere."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import tomli_w
import torch
from torch import Tensor

from leaktight.audits.experiment import TrialRunner
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.summary import cell_of
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.config.audit import build_experiment, complete
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config, load_config
from leaktight.config.tables import as_list
from leaktight.config.toml import table_of
from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.core.keys import KEY_BYTES
from leaktight.core.protocols import Attack, Progress
from leaktight.core.reading import parse_toml
from leaktight.core.rng import Rng
from leaktight.core.text import sides
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.inspections.files import read_tensors
from leaktight.report.run_cards import attacker_of, cards_of_run
from leaktight.results.card import Card, Source, read_card, read_cards, with_utility, write_cards
from leaktight.results.schema import UNDEFENDED, Trial, plain

CONTROLS = ("prior_only", "mean_image", "public_image")
FACTS = "facts.json"


@dataclass(frozen=True, eq=False)
class Handed(Attack):
    """A guess that was made elsewhere; None for a blank one. seen: what the attacker saw is added to it."""

    guess: Tensor | None
    seen: list[Observation]

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        first = seen[0]
        self.seen.extend(seen)
        number = first.batch_size or 1
        guess = torch.zeros(number, *first.inputs.shape) if self.guess is None else self.guess
        labels = torch.zeros(len(guess), dtype=torch.long) if first.labels is None else first.labels[: len(guess)]
        return Reconstruction(guess=Batch(guess, labels), loss=0.0)


def add(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Make or update the cards of finished runs whose digests verify, keep the worst, and return their files.

    The accuracy and the cost that a trade-off measured also go to the other cards of the same defense and settings.
    """
    new = [card for run in runs for card in cards_of_run(run)]
    there = read_cards(folder) if any(folder.glob("*/*/*.json")) else []
    files = {card.file for card in new}
    others = with_utility(there, new)
    changed = [now for was, now in zip(there, others, strict=True) if now != was and now.file not in files]
    return write_cards(folder, [*with_utility(new, [*there, *new]), *changed])


def updates(file: Path, out: Path) -> list[Path]:
    """Write fresh updates of a card's victims as an attacker sees them, a folder for each, and return the folders.

    The clients' secrets are drawn anew and forgotten, so noise, keys and masks cannot be computed from the card.
    """
    card = read_card(file)
    scene = Scene.of(card)
    folders = []
    for place in scene.victims:
        handed = Handed(None, [])
        scene.judged(place, handed, "nobody", adaptive=True)
        folders.append(out / place)
        _write_seen(handed.seen[-1], folders[-1])
    return folders


def submit(file: Path, guesses: Path, *, attack: str, by: str, code: str = "", adaptive: bool = True) -> Card:
    """Score guesses for the victims of a card, add them to the card, and return it.

    guesses: a .safetensors, .npz or .pt file with a tensor (N, C, H, W) in [0, 1] for each victim, named as in the
    card: t000, t001 ... They are judged as an attack of an audit is: against the truth, controls and decoys.
    by, code: who made them, and where the code is. adaptive: whether the defense was known.
    """
    card, folder = read_card(file), file.resolve().parents[2]
    if file.resolve() != folder / card.file:
        raise UsageError(f"expected the card in its place in a leaderboard, {card.file}, got {file}; move it there")
    for name, value in (("attack", attack), ("by", by)):
        if not value.strip():
            raise UsageError(f"expected a name for --{name}, got an empty one; say what or who made the guesses")
    scene, given = Scene.of(card), read_tensors(guesses)
    unknown = sorted(given.tensors.keys() - scene.victims.keys())
    if unknown:
        raise UsageError(
            f"{guesses}: expected guesses named as the victims, {', '.join(scene.victims)}, got {unknown[0]!r}; rename "
            "them"
        )
    trials = [
        trial
        for place, guess in given.tensors.items()
        for trial in scene.judged(place, Handed(scene.checked(guess, place), []), attack, adaptive=adaptive)
    ]
    cells = gather(trials)
    panel = Panel(cells, scene.experiment.settings.confidence)
    own = next(cell for cell in cells if cell.role == "attack")
    level = panel.level(own)
    shown = [trial for trial in trials if trial.role == "attack"]
    found = attacker_of(cell_of(own, panel, []), shown, word=level, run=given.digest)
    source = Source(digest=given.digest, config=scene.source.config, victims=scene.victims)
    added = card.model_copy(
        update={
            "attackers": (found.model_copy(update={"by": by, "code": code}),),
            "sources": (source,),
            "word": level or card.word,
        }
    )
    write_cards(folder, [added])
    return read_card(file)


@dataclass(frozen=True)
class Scene:
    """The experiment of a card, with its defense and its controls alone, and with secrets of its own.

    source: the run that the victims are from.
    """

    card: Card
    source: Source
    experiment: Experiment

    @classmethod
    def of(cls, card: Card) -> Scene:
        """The scene of a card. Raises UsageError if its victims cannot be made again."""
        source = next((each for each in card.sources if each.victims), None)
        if source is None or card.track != "diagnostic" or card.setting.round:
            raise UsageError(
                f"{card.file}: expected victims of an untrained network in the diagnostic track; others depend on "
                "the secrets of a training run: add a run of your own with leaktight leaderboard add"
            )
        config = complete(_config(source), defenses_named=True)
        experiment = build_experiment(config, *load_data(config), adaptive=False)
        own = [each for each in experiment.defenses if each.name in (UNDEFENDED, card.defense)]
        controls = [each for each in experiment.attacks if each.role == "control"]
        bare = replace(experiment, defenses=own, attacks=controls)
        return cls(card, source, bare.keyed(secrets.token_bytes(KEY_BYTES)))

    @property
    def victims(self) -> dict[str, str]:
        """The digests of the victims' examples by name."""
        return dict(self.source.victims)

    def checked(self, guess: Tensor, place: str) -> Tensor:
        """The guess as floats. Raises UsageError if its shape or its values do not fit."""
        shape = self.experiment.federation.dataset.inputs.shape
        if guess.ndim != 1 + len(shape) or guess.shape[1:] != shape or not guess.is_floating_point():
            raise UsageError(
                f"{place}: expected floats of shape (N, {', '.join(map(str, shape))}) in [0, 1], got {guess.dtype} of "
                f"{sides(guess.shape)}; convert them"
            )
        if not len(guess) or not bool(torch.isfinite(guess).all()):
            got = "NaN or infinity" if len(guess) else "none"
            raise UsageError(f"{place}: expected at least one guess of finite pixels, got {got}; leave the victim out")
        return guess.float().clamp(0, 1)

    def judged(self, place: str, handed: Handed, attack: str, *, adaptive: bool) -> list[Trial]:
        """The trials of a guess and of the controls on a victim. Raises UsageError if one fails."""
        number = int(place.removeprefix("t"))
        entry = AttackEntry(attack, {}, handed, against=self.card.defense if adaptive else None)
        experiment = replace(self.experiment, attacks=(entry, *self.experiment.attacks))
        runner = TrialRunner(experiment)
        found = [
            runner(spec.id, lambda each: None).trial
            for spec in experiment.trials
            if spec.trial == number and spec.defense.name == self.card.defense
        ]
        failed = next((trial.error for trial in found if trial.error), None)
        if failed is not None:
            raise UsageError(f"{self.card.file}: {place} cannot be judged: {failed}")
        if found[0].examples != self.source.victims[place]:
            raise UsageError(
                f"{self.card.file}: the victims depend on secrets of the run, so they cannot be made again; expected "
                "clients that hold exactly the examples of one update: add a run of your own"
            )
        return found


def _config(source: Source) -> Config:
    """The config of a run, with no other attacks than controls, so that no code of others is looked up."""
    tables = parse_toml(source.config, "the config of a card", UsageError)
    attacks = as_list(tables.get("attack", []))
    tables["attack"] = [each for each in attacks if isinstance(each, Mapping) and each.get("kind") in CONTROLS]
    tables.pop("production", None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(tables))
        return load_config(path)


def _write_seen(seen: Observation, folder: Path) -> None:
    """Write the model as it was sent, the update, and what else the attacker knows."""
    sent = {**seen.broadcast.params, **seen.broadcast.buffers}
    for name, tensors in (("before", sent), ("update", seen.update.tensors)):
        content = {key: each.detach().contiguous() for key, each in tensors.items()}
        write_atomically(folder / f"{name}.safetensors", safetensors.torch.save(content))
    facts = {
        "update": seen.update.kind,
        "labels": None if seen.labels is None else seen.labels.tolist(),
        "examples": seen.batch_size,
        "mode": seen.mode,
        "local": None if seen.local_training is None else plain(table_of(seen.local_training)),
    }
    write_atomically(folder / FACTS, json.dumps(facts, indent=1) + "\n")
