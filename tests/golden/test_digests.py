"""No number changes unnoticed: digests of canonical runs, as they were before anything was moved.

A digest that fails says that a result is no longer what it was. If that is meant, say why in the commit and write the
file again: `python -m tests.golden.test_digests --write [NAME...]`. Names are those of the runs, or how they begin.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.attack_runs import ADAPTIVE, ATTACKS, LABELS, Run
from tests.golden.command_runs import COMMANDS
from tests.golden.doors import names
from tests.golden.federation_runs import DEFENDED, TRAINED
from tests.golden.stable import machine, stable

FILE = Path(__file__).with_name("digests.json")
FAMILIES: Mapping[str, Mapping[str, Run]] = {
    "attack": ATTACKS,
    "adaptive": ADAPTIVE,
    "labels": LABELS,
    "defense": DEFENDED,
    "train": TRAINED,
    "command": COMMANDS,
}
RUNS: Mapping[str, Run] = {f"{family}/{name}": run for family, runs in FAMILIES.items() for name, run in runs.items()}


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def digests_of(name: str) -> dict[str, str]:
    """A digest of each part of a run's result."""
    return {part: stable(value) for part, value in RUNS[name]().items()}


@cache
def same_machine() -> bool:
    return bool(machine() == recorded()["machine"])


@pytest.mark.parametrize("name", RUNS)
def test_no_number_changed(name: str) -> None:
    if not same_machine():
        pytest.skip("this machine rounds otherwise than the one of digests.json; write the file again to use it here")
    assert digests_of(name) == recorded()["runs"][name]


def test_the_file_holds_these_runs_and_no_others() -> None:
    assert list(recorded()["runs"]) == sorted(RUNS)


@pytest.mark.parametrize(
    ("family", "runs"),
    [
        ("attacks", ATTACKS),
        ("labels", LABELS),
        ("defenses", DEFENDED),
        ("aggregators", {name.removeprefix("in_process/"): run for name, run in TRAINED.items()}),
    ],
)
def test_everything_in_the_catalogue_has_a_run(family: str, runs: Mapping[str, Run]) -> None:
    assert set(names(family)) <= set(runs)


def test_every_defense_has_a_run_against_the_attacker_who_knows_it() -> None:
    assert set(names("defenses")) - {"none"} <= set(ADAPTIVE)


def test_one_bit_of_one_number_is_another_digest() -> None:
    images = torch.full((2, 3), 0.1)
    nearest = images.clone()
    nearest[1, 2] = torch.nextafter(nearest[1, 2], torch.tensor(1.0))
    assert stable({"images": images}) != stable({"images": nearest})
    assert stable({"loss": 0.1234567}) != stable({"loss": 0.1234577})
    assert stable({"a": 1, "b": [0.5, None]}) == stable({"b": (0.5, None), "a": 1})


def write(chosen: Sequence[str]) -> None:
    """Run those of the runs whose name begins so (all, without a name), and keep the digests of the others."""
    torch.set_num_threads(1)
    kept = recorded()["runs"] if chosen and FILE.exists() else {}
    runs = {name: digests for name, digests in kept.items() if name in RUNS}
    for name in RUNS:
        if not chosen or name.startswith(tuple(chosen)):
            begun = time.perf_counter()
            try:
                runs[name] = digests_of(name)
            except pytest.skip.Exception as reason:
                sys.exit(f"{name} cannot be run here, nothing is written: {reason}")
            sys.stderr.write(f"{time.perf_counter() - begun:6.2f} s  {name}\n")
    FILE.write_text(json.dumps({"machine": machine(), "runs": dict(sorted(runs.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit("usage: python -m tests.golden.test_digests --write [NAME...]")
    write(sys.argv[2:])
