from __future__ import annotations

from pathlib import Path

import pytest
from tests.here import Here
from tests.results.made_cards import made_attacker, made_card, made_setting, made_utility, reference

from leaktight.report.board import render_leaderboard
from leaktight.report.run_cards import claims_of
from leaktight.report.standings import ACCURACY_FLOOR, RULES, boards_of, leak_of, ranked
from leaktight.results.card import Card, write_cards


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


def ranks(*cards: Card) -> dict[str, int | None]:
    return {row.card.defense: row.rank for row in ranked([reference(), *cards])}


def why(card: Card) -> str:
    (found,) = [row for row in ranked([reference(), card]) if row.card.defense == card.defense]
    assert found.rank is None
    return found.why


def test_the_worst_over_attackers_and_victims_ranks() -> None:
    quiet = made_card("quiet", naive=9.0, knowing=11.0)
    leaky = made_card("leaky", naive=35.0, knowing=12.0)
    known = made_card("known", naive=6.0, knowing=25.0)
    submitted = made_card("submitted", attackers=(*quiet.attackers, made_attacker(39.0, victims=1, by="somebody")))
    assert ranks(leaky, known, quiet, submitted) == {"quiet": 1, "known": 2, "leaky": 3, "submitted": 4, "none": None}


def test_guesses_that_tell_nothing_apart_share_a_rank() -> None:
    assert ranks(made_card("a", 4.0, 6.0), made_card("b", 9.0, 5.0)) == {"a": 1, "b": 1, "none": None}
    assert ranks(made_card("a", 4.0, 55.0), made_card("b", 90.0, 5.0)) == {"a": 1, "b": 1, "none": None}
    assert leak_of(made_card(naive=4.0, knowing=6.0)) == 10.0


def test_no_rank_without_an_attacker_who_knows_the_defense() -> None:
    assert why(made_card("naive", 8.0, None)) == "no attacker who knows the defense"
    card = made_card("naive", 8.0, None, no_adaptive="the order of batches is unknown")
    assert why(card) == "no attacker who knows the defense: the order of batches is unknown"
    few = made_card(attackers=(made_attacker(8.0, adaptive=False), made_attacker(9.0, victims=9)))
    assert why(few).startswith("9 victims")
    submitted = made_card("naive", 8.0, None, attackers=(made_attacker(9.0, by="somebody"),))
    assert ranks(submitted)["naive"] == 1


def test_no_rank_below_the_floor_of_accuracy() -> None:
    assert ranks(made_card(utility=made_utility(ACCURACY_FLOOR * 0.9, 0.9)))["noise"] == 1
    assert why(made_card(utility=made_utility(ACCURACY_FLOOR * 0.9 - 0.01, 0.9))).startswith("keeps 89 %")
    assert why(made_card(utility=None)) == "accuracy not measured"
    assert why(made_card(utility=made_utility(0.9, None))) == "accuracy not measured"


def test_no_rank_where_no_attack_works_without_a_defense() -> None:
    rows = ranked([reference(word="cannot-conclude"), made_card()])
    assert [row.why for row in rows] == ["no attack works here without a defense", "the reference"]


def test_tracks_and_settings_are_apart() -> None:
    cards = [
        made_card("a", 8.0, 30.0),
        made_card("b", 8.0, 20.0, track="production"),
        made_card("c", 8.0, 25.0, setting=made_setting(batch_size=4, num_examples=4)),
    ]
    boards = boards_of(cards)
    assert [(board.track, [row.card.defense for row in board.rows]) for board in boards] == [
        ("diagnostic", ["a"]),
        ("diagnostic", ["c"]),
        ("production", ["b"]),
    ]
    assert {row.rank for board in boards for row in board.rows} == {1}


def test_the_page_has_every_card_the_rules_and_no_code_of_a_card() -> None:
    evil = made_card("<script>alert(1)</script>")
    page = render_leaderboard([reference(), evil, made_card("outpost", claims=claims_of("outpost"))])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "OUTPOST (Wang et al.), Table III" in page
    assert "no defense" in page
    for rule in RULES:
        assert rule.split("'")[0][:60] in page


def test_the_command_checks_the_cards_and_writes_the_page(tmp_path: Path, here: Here) -> None:
    (file, _) = write_cards(tmp_path / "leaderboard", [made_card(), reference()])
    code, out, _ = here("leaderboard")
    assert (code, "2 cards" in out) == (0, True)
    assert (tmp_path / "leaderboard.html").exists()
    code, _, _ = here("leaderboard", "leaderboard", "--out", "page.html")
    assert code == 0
    assert (tmp_path / "page.html").read_text() == (tmp_path / "leaderboard.html").read_text()
    file.write_text(file.read_text().replace('"worst": 12.0', '"worst": 2.0'))
    code, _, err = here("leaderboard", "leaderboard")
    assert code == 2
    assert "was changed after it was written" in err
    assert err.count("\n") == 1
    assert here("leaderboard", "nowhere")[0] == 2
