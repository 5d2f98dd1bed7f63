from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import ROOT
from tests.results.made_cards import made_attacker, made_card, made_setting, made_utility

from leaktight.core.errors import LeaktightError, ResultsError, UsageError
from leaktight.results.card import Card, read_card, read_cards, with_utility, write_cards
from leaktight.results.schema import Word, parse

jsonschema = pytest.importorskip("jsonschema")


def test_a_card_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    card = made_card()
    (file,) = write_cards(tmp_path, [card])
    assert read_card(file) == card
    assert read_cards(tmp_path) == [card]
    schema = json.loads((ROOT / "docs/schema/card.json").read_text())
    jsonschema.validate(json.loads(file.read_text()), schema)


def changed_worst(document: dict[str, Any]) -> None:
    document["attackers"][0]["worst"] = 1.0


def changed_accuracy(document: dict[str, Any]) -> None:
    document["utility"]["accuracy"] = 0.99


def without_digest(document: dict[str, Any]) -> None:
    del document["digest"]


@pytest.mark.parametrize("change", [changed_worst, changed_accuracy, without_digest])
def test_a_card_that_was_changed_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    (file,) = write_cards(tmp_path, [made_card()])
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="was changed after it was written"):
        read_cards(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Invalid JSON"),
        ("{}", "Field required"),
        (json.dumps({**made_card().document(), "schema_version": 99}), "update Leaktight"),
        (json.dumps({**made_card().document(), "track": "easy"}), "track"),
    ],
)
def test_bad_cards_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / made_card().file
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(LeaktightError, match=message) as raised:
        read_cards(tmp_path)
    assert str(file) in str(raised.value)


def test_a_card_in_another_place_is_refused(tmp_path: Path) -> None:
    (file,) = write_cards(tmp_path, [made_card()])
    file.rename(file.with_name("soteria-123456.json"))
    with pytest.raises(ResultsError, match="expected the name diagnostic/"):
        read_cards(tmp_path)


def test_no_folder_and_no_cards_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the folder of a leaderboard"):
        read_cards(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="has no cards"):
        read_cards(tmp_path)


def test_cards_of_one_defense_and_setting_are_joined_and_the_worst_is_kept(tmp_path: Path) -> None:
    weak, strong = made_card(naive=8.0, knowing=30.0), made_card(naive=9.0, knowing=15.0)
    for cards in ([weak], [strong], [weak]):
        (file,) = write_cards(tmp_path, cards)
    found = read_card(file)
    assert found.word == "reconstructed"
    assert [(each.adaptive, each.worst) for each in found.attackers] == [(False, 9.0), (True, 30.0)]
    write_cards(tmp_path, [made_card(attackers=(made_attacker(50.0, by="somebody"),))])
    assert [each.by for each in read_card(file).attackers] == ["", "", "somebody"]
    assert read_card(file).worst == 50.0


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (("nothing-found", "reconstructed"), "reconstructed"),
        (("cannot-conclude", "nothing-found"), "nothing-found"),
        (("identified", "cannot-conclude"), "identified"),
        (("cannot-conclude", "cannot-conclude"), "cannot-conclude"),
    ],
)
def test_the_joined_verdict_is_the_worst_that_was_found(words: tuple[Word, Word], joined: Word) -> None:
    first, second = (made_card(word=word) for word in words)
    assert first.joined(second).word == joined
    assert second.joined(first).word == joined


def test_settings_have_names_of_their_own() -> None:
    names = {made_setting(**change).name for change in ({}, {"batch_size": 4}, {"local": {"learning_rate": 0.1}})}
    assert len(names) == 3
    assert all(name.startswith("digits-lenet_zhu-wide-b") for name in names)
    other = made_card(defense_settings={"noise_std": 0.2})
    assert other.file != made_card().file


def test_costs_go_to_the_same_defense_with_the_same_settings() -> None:
    bare = [made_card(utility=None), made_card(defense_settings={"noise_std": 0.2}, utility=None)]
    measured = made_card("noise(noise_std=0.1)", defense_settings={"noise_std": 0.1}, utility=made_utility(0.5))
    same, other = with_utility(bare, [measured])
    assert same.utility == made_utility(0.5)
    assert other.utility is None
    assert parse(Card, json.dumps(same.document()), "card").sealed() == same
