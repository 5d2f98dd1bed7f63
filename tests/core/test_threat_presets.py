"""Named threat models: their facts, and how others are placed beside them."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from leaktight.core.errors import UsageError
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.threat_presets import FACTS, PRESETS, placed


def test_every_fact_has_words() -> None:
    assert set(FACTS) == {fact.value for fact in Knowledge}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_threat_model_of_its_facts_and_is_found_by_them(name: str) -> None:
    preset, threat = PRESETS[name], ThreatModel.preset(name)
    assert (threat.server, threat.sees) == (preset.server, preset.sees)
    assert sorted(fact.value for fact in threat.knows) == list(preset.knows), "sorted"
    found = placed(preset.server, preset.sees, preset.knows)
    assert found.preset == name
    assert found.exact
    assert found.sentence == preset.sentence
    assert preset.sentence.endswith(".")


def test_the_letters_follow_from_the_facts() -> None:
    """Active manipulation is F and on; surrogate data are D and G; A knows nothing but the update."""
    for preset in PRESETS.values():
        data = "public_data" in preset.knows
        if preset.server == "malicious":
            assert preset.letter == ("G" if data else "F")
        else:
            assert preset.letter == ("D" if data else "C" if preset.knows else "A")


def test_every_threat_model_has_a_place() -> None:
    facts = sorted(FACTS)
    for server, sees, bits in product(("curious", "malicious"), ("client", "aggregate"), range(2 ** len(facts))):
        knows = {fact for place, fact in enumerate(facts) if bits >> place & 1}
        found = placed(server, sees, knows)
        preset = PRESETS[found.preset]
        assert (preset.server, preset.sees) == (server, sees)
        assert ({*preset.knows} | {*found.also}) - {*found.without} == knows


def test_what_an_attack_adds_or_hides_is_said() -> None:
    adaptive = placed("curious", "client", [*PRESETS["diagnostic"].knows, "defense"])
    assert adaptive.preset == "diagnostic"
    assert adaptive.sentence == f"{PRESETS['diagnostic'].sentence} It also knows the defense."
    less = placed("curious", "aggregate", ["batch_size"])
    assert less.sentence.endswith("It does not know the batch statistics and the local training.")
    hidden = [fact for fact in PRESETS["diagnostic"].knows if fact != "labels"]
    assert placed("curious", "client", hidden).preset == "curious_server", (
        "an attack that reads labels is not told them"
    )


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown threat model 'diagnostik'; did you mean 'diagnostic'"):
        ThreatModel.preset("diagnostik")


def test_presets_are_there_without_torch() -> None:
    code = "import sys, leaktight.core.threat_presets; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_page_has_every_preset_with_its_sentence_facts_and_letter() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "threat-models.md").read_text()
    for name, preset in PRESETS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        _, _, who, knows, letter, _ = (cell.strip() for cell in row.split("|"))
        assert who.startswith(preset.sentence)
        assert knows == (", ".join(f"`{fact}`" for fact in preset.knows) or "nothing else")
        assert letter == (f"{preset.letter}; {preset.beyond}" if preset.beyond else preset.letter)
