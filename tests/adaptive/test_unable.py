"""Where knowing a defense does not help, it is said with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn

from leaktight.adaptive import table
from leaktight.adaptive.knowing import Adaptation, Case
from leaktight.adaptive.noise import KnowsNoise
from leaktight.core.protocols import Defense
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.stack import Stack

CASE = Case(model=nn.Linear(2, 2), num_examples=4, num_steps=1)


@dataclass(frozen=True)
class _Foreign(Defense):
    """A defense that nobody has adapted to."""


@dataclass(frozen=True, kw_only=True)
class _SingleExamples(KnowsNoise):
    """Helps with one example only."""

    def unable(self, case: Case) -> str | None:
        return "more than one example" if case.num_examples > 1 else None


def test_a_defense_without_an_adaptation_says_that_nothing_is_known() -> None:
    assert table.unable(_Foreign(), CASE) == "nothing is known that helps against it"
    assert table.unable(AdditiveNoise(noise_std=0.1), CASE) is None
    assert Adaptation(defense=_Foreign()).unable(CASE) is None


def test_a_stack_is_hopeless_only_if_all_its_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = AdditiveNoise(noise_std=0.1)
    both = Stack(parts=(noise, AdditiveNoise(noise_std=0.2)))
    monkeypatch.setattr(table, "ADAPTATIONS", {AdditiveNoise: _SingleExamples})
    assert table.unable(both, CASE) == "more than one example; more than one example"
    monkeypatch.setattr(table, "ADAPTATIONS", {AdditiveNoise: KnowsNoise})
    assert table.unable(both, CASE) is None
