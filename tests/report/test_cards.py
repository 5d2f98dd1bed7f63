"""A card speaks of one victim: its picture, its controls and its scores are of the same trial and the same example."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.report.made_run import BATCH, MadeRun, strip
from tests.results.made import changed

from leaktight.report.cards import Card, Evidence, View, cards_of
from leaktight.report.html import render_report
from leaktight.report.page import build_page
from leaktight.report.pictures import Album
from leaktight.report.runs import load_run
from leaktight.report.words import number
from leaktight.results.schema import UNDEFENDED, Trial

ROUNDS = (0, 5)
VICTIMS = 3


class Rounds(MadeRun):
    """Three victims of batches of two, each attacked in two rounds in which it trains on other examples."""

    def fill(self) -> Rounds:
        for defense, share in (("none", 0.02), ("outpost", 0.3)):
            for victim in range(VICTIMS):
                for place in range(len(ROUNDS)):
                    self.put(defense, "csdlg", victim, place, share + 0.03 * victim - 0.01 * place)
                    self.put(defense, "prior_only", victim, place, 1.0, role="control")
                    self.put(defense, "mean_image", victim, place, 0.8 + 0.05 * place, role="control")
        return self

    def put(self, defense: str, attack: str, victim: int, place: int, share: float, **options: Any) -> None:
        """A trial whose pictures are those of another batch in each round."""
        self.add(defense, attack, 2 * victim + place, share, **options)
        made, round_index = self.trials.pop(), ROUNDS[place]
        name = f"{defense}-{attack}-v{victim}-r{round_index}"
        assert made.images is not None
        for kind in (made.images.truth, made.images.guess):
            (self.path / str(kind)).rename(
                self.path / f"images/{name}-{'truth' if 'truth' in str(kind) else 'guess'}.png"
            )
        pictures = made.images.document() | {"truth": f"images/{name}-truth.png", "guess": f"images/{name}-guess.png"}
        client = f"client-{victim:03d}"
        self.trials.append(changed(made, id=name, trial=victim, round=round_index, client=client, images=pictures))
        self.write()

    def lose(self, *lost: str) -> Rounds:
        """Make these trials failed ones."""
        failed: dict[str, object] = {
            "status": "failed",
            "error": "out of memory",
            "scores": {},
            "images": None,
            "rank": None,
        }
        self.trials = [changed(each, **failed) if each.id in lost else each for each in self.trials]
        self.write()
        return self


def cards(made: MadeRun) -> tuple[Card, ...]:
    page = build_page(load_run(made.finish()))
    return tuple(card for part in page.parts for card in part.cards)


def tile(folder: Path, file: str, index: int) -> np.ndarray:
    """The picture of one example in a strip, cut here anew."""
    whole = np.asarray(Image.open(folder / file))
    width = whole.shape[1] // BATCH
    return whole[:, index * width : (index + 1) * width]


def pixels(uri: str | None) -> np.ndarray:
    assert uri is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def whose(made: MadeRun, view: View) -> tuple[Trial, int]:
    """The trial and the example that a picture of a card shows."""
    found = [
        (trial, index)
        for trial in made.trials
        if trial.images is not None
        for index in range(BATCH)
        if np.array_equal(tile(made.path, trial.images.guess, index), pixels(view.picture))
    ]
    assert len(found) == 1, "no two guesses of the made run look the same"
    return found[0]


def victim(trial: Trial) -> tuple[object, ...]:
    return trial.track, trial.trial, trial.round, trial.client, trial.examples


def evidence_of(card: Card) -> Evidence:
    assert card.evidence is not None
    return card.evidence


def test_all_of_a_card_is_of_one_victim(tmp_path: Path) -> None:
    made = Rounds(tmp_path / "run").fill()
    found = cards(made)
    assert [card.verdict.defense for card in found] == ["none", "outpost"]
    for card in found:
        evidence = evidence_of(card)
        shown = {view.kind: whose(made, view) for view in evidence.views}
        own, index = shown["this"]
        assert own.id == card.verdict.trial_id
        assert own.defense == card.verdict.defense
        assert set(shown) == {"this", "negative"} | ({"positive"} if own.defense != UNDEFENDED else set())
        assert {victim(trial) for trial, _ in shown.values()} == {victim(own)}
        assert {each for _, each in shown.values()} == {index}
        assert own.images is not None
        assert own.images.truth is not None
        assert np.array_equal(pixels(evidence.truth), tile(made.path, own.images.truth, index))
        for view in evidence.views:
            trial, _ = shown[view.kind]
            scores = {"PSNR": "psnr", "SSIM": "ssim"}
            values = {name: number((trial.scores[metric] or ())[index], metric) for name, metric in scores.items()}
            assert dict(view.scores) == values
        if "positive" in shown:
            assert shown["positive"][0].defense == UNDEFENDED
            assert shown["positive"][0].attack == own.attack
        assert shown["negative"][0].role == "control"
        assert evidence.missing == ()
        assert f"{own.client}, round {own.round}, trial {own.trial}" in evidence.title


def test_a_control_that_failed_is_not_replaced_by_that_of_another_round(tmp_path: Path) -> None:
    """The same client trained on other examples in the other round: its pictures are of another victim."""
    made = Rounds(tmp_path / "run").fill()
    shown = next(card for card in cards(made) if card.verdict.defense == "outpost").verdict.trial_id
    own = next(trial for trial in made.trials if trial.id == shown)
    beside = f"v{own.trial}-r{own.round}"
    made.lose(
        f"none-csdlg-{beside}",
        *(f"{each}-{name}-{beside}" for each in ("none", "outpost") for name in ("prior_only", "mean_image")),
    )
    card = next(card for card in cards(made) if card.verdict.trial_id == shown)
    evidence = evidence_of(card)
    assert [view.kind for view in evidence.views] == ["this"]
    assert evidence.missing == (
        "No positive control of this victim: csdlg without a defense ended in an error.",
        "No negative control of this victim.",
    )
    text = render_report(load_run(made.path))
    assert all(sentence in text for sentence in evidence.missing)


def test_a_control_with_other_examples_is_of_another_victim(tmp_path: Path) -> None:
    """An active attack may end in another round than the one in which the controls were asked."""
    made = Rounds(tmp_path / "run").fill()
    made.trials = [changed(each, examples="f" * 16) if each.role == "control" else each for each in made.trials]
    made.write()
    for card in cards(made):
        evidence = evidence_of(card)
        assert "negative" not in {view.kind for view in evidence.views}
        assert evidence.missing[-1] == "No negative control of this victim."


def test_a_positive_control_that_is_not_valid_proves_nothing(tmp_path: Path) -> None:
    made = Rounds(tmp_path / "run").fill()
    made.trials = [
        changed(each, first_loss=1.0, loss=1.0) if (each.defense, each.attack) == ("none", "csdlg") else each
        for each in made.trials
    ]
    made.write()
    run = load_run(made.path)
    verdicts = [card.verdict for card in cards(Rounds(tmp_path / "whole").fill())]
    judged = [each for each in verdicts if each.defense == "outpost"]
    found = cards_of(judged, run.trials, Album(made.path, 1, run.trials))
    evidence = evidence_of(found[0])
    assert [view.kind for view in evidence.views] == ["this", "negative"]
    assert evidence.missing == (
        "No positive control of this victim: csdlg without a defense: its own loss did not fall.",
    )


@pytest.mark.parametrize("example", [0, 1])
def test_the_example_is_the_one_that_the_judge_names(tmp_path: Path, example: int) -> None:
    made = Rounds(tmp_path / "run").fill()
    verdicts = [changed(card.verdict, example=example) for card in cards(made)]
    run = load_run(made.path)
    for card in cards_of(verdicts, run.trials, Album(made.path, 1, run.trials)):
        evidence = evidence_of(card)
        assert {whose(made, view)[1] for view in evidence.views} == {example}
        assert f"image {example + 1} of {BATCH}" in evidence.title


def test_pictures_of_the_made_run_differ(tmp_path: Path) -> None:
    """What the tests above rest on."""
    made = Rounds(tmp_path / "run").fill()
    assert len(made.trials) == 2 * VICTIMS * len(ROUNDS) * 3
    assert strip([np.zeros((2, 2, 3), np.uint8)] * BATCH).width == 2 * BATCH
    files = {(each.trial, each.round): each.images.truth for each in made.trials if each.images}
    truths = {place: (made.path / str(file)).read_bytes() for place, file in files.items()}
    assert len(set(truths.values())) == VICTIMS * len(ROUNDS) - 1  # ten faces, so that the last batch is the first
