"""Naive against adaptive: csDLG on every defense of the catalogue, without and with knowledge of it.

    python -m bench adaptive                       # every setting, the cheapest and most important first
    python -m bench adaptive --only 'cifar10-*-b1-s1' --workers 2 --minutes 60
    python -m bench adaptive cost                  # accuracy and cost of every defense on the embedded digits
    python -m bench adaptive render                # docs/results/adaptive.md and its figure, from the cards

A setting is an ordinary audit in a folder below --runs, which a later call continues. Its cards go to --to. Clients
hold exactly the examples of one update, so that the seed alone fixes the victims, which are test images. Defenses whose
clients agree on something in pairs (LRP) are attacked in a second run with fewer clients, of 100 examples each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

from bench.adaptive_page import write_page
from bench.defenses import NEEDY
from leaktight.api.audit import PlannedAudit, plan
from leaktight.api.leaderboard import add
from leaktight.audits.run import Watcher
from leaktight.config.catalogue import DEFENSES
from leaktight.core.protocols import Defense
from leaktight.results.schema import UNDEFENDED, Round, Trial

HELD = 8000
"""Images of the test part that clients hold; the other 2000 are public."""
FEW = 80
"""Clients behind a defense whose clients agree on something in pairs, which takes minutes with a thousand of them."""
VICTIMS = 10
SEED = 16
"""Draws the victims. The settings of the search were chosen on victims of seed 0."""
NOTHING_BELOW = 0.3
""""Nothing found" in 10 victims shows with 95 % confidence that fewer than this share is reconstructed."""
PATIENCE = 60
"""Evaluations of L-BFGS without a loss 1 % lower after which a search ends."""
ITERATIONS = {(1, 1): 16, (4, 1): 14, (1, 4): 10, (4, 4): 6}
"""Most iterations (of up to 20 evaluations) by batch size and steps: the more an evaluation costs, the fewer."""
COARSE = 4
"""Iterations before them, for images of half the size."""
EQUAL = {"kind": "fedavg", "scheme": "I"}
"""Clients count equally, as LRP needs it; they have equally many examples."""
ROUNDS = 20
"""Rounds of training for accuracy and cost."""


@dataclass(frozen=True)
class Case:
    """A setting of the table."""

    data: str
    init: str
    batch: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.init}-b{self.batch}-s{self.steps}"

    @property
    def examples(self) -> int:
        return self.batch * self.steps

    def planned(self, defenses: Sequence[Defense], victims: int, *, clients: int) -> PlannedAudit:
        return plan(
            "audit",
            seed=SEED,
            data={"kind": self.data, "part": "test"},
            partition={"kind": "iid", "clients": clients, "validation": 0.0},
            model={"kind": "lenet_zhu", "init": self.init, "activation": "sigmoid"},
            local={"epochs": 1, "batch_size": self.batch, "learning_rate": 0.01},
            federation={"rounds": 1, "per_round": 1, "aggregator": EQUAL},
            threat="diagnostic",
            attacks=[_attack(ITERATIONS[self.batch, self.steps]), "mean_image", "public_image"],
            defenses=defenses,
            settings=[
                f"audit.trials={victims}",
                f"audit.confidence={NOTHING_BELOW}",
                "audit.metrics=[]",
                f"audit.local.samples={self.examples}",
                f"audit.local.batch_size={self.batch}",
                "audit.local.epochs=1",
            ],
        )


CASES = [
    Case(data, init, batch, steps)
    for (batch, steps), data, init in product(ITERATIONS, ("cifar10", "mnist"), ("default", "wide"))
]


def cost_plan(defenses: Sequence[Defense], victims: int) -> PlannedAudit:
    """A trade-off on the embedded digits: accuracy after some rounds, a client's seconds and bytes."""
    return plan(
        "tradeoff",
        seed=SEED,
        data={"kind": "digits", "size": 8},
        partition={"kind": "iid", "clients": 20},
        model={"kind": "lenet_zhu", "init": "default", "activation": "relu"},
        local={"epochs": 5, "batch_size": 16, "learning_rate": 0.3},
        federation={"rounds": ROUNDS, "per_round": 10, "aggregator": EQUAL},
        threat="diagnostic",
        attacks=[_attack(ITERATIONS[1, 1]), "mean_image", "public_image"],
        defenses=defenses,
        settings=[
            f"audit.trials={victims}",
            f"audit.confidence={NOTHING_BELOW}",
            "audit.metrics=[]",
            "audit.local.samples=1",
            "audit.local.batch_size=1",
            "audit.local.epochs=1",
        ],
    )


def _attack(iterations: int) -> dict[str, object]:
    return {"kind": "csdlg", "iterations": iterations, "coarse": COARSE, "patience": PATIENCE}


def defenses_of(kinds: Sequence[str]) -> list[Defense]:
    """These defenses of the catalogue with their default settings; all of them if none is named."""
    return [NEEDY.get(kind) or DEFENSES[kind]() for kind in kinds or DEFENSES if kind != UNDEFENDED]


def agrees(defense: Defense) -> bool:
    """Whether clients talk to each other before the first round."""
    return next(iter(defense.agree(["a", "b"])), None) is not None


@dataclass
class Progress(Watcher):
    """Prints how far a run is, and how long it will take."""

    name: str
    workers: int
    done: int = 0
    total: int = 0
    before: int = 0
    spent: float = 0.0
    said: float = field(default_factory=time.monotonic)

    def round_done(self, name: str, row: Round) -> None:
        self._say(f"{name}: round {row.round}, accuracy {row.accuracy}")

    def trials_begin(self, done: int, total: int) -> None:
        self.done = self.before = done
        self.total = total
        print(f"{self.name}: {done} of {total} trials are done", flush=True)

    def trial_done(self, trial: Trial) -> None:
        self.done += 1
        self.spent += trial.seconds
        each = self.spent / (self.done - self.before)
        left = each * (self.total - self.done) / max(1, self.workers) / 60
        self._say(f"{self.name}: {self.done} of {self.total}, {each:.1f} s a trial, about {left:.0f} minutes left")

    def _say(self, text: str, every: float = 20.0) -> None:
        if time.monotonic() - self.said > every:
            self.said = time.monotonic()
            print(text, flush=True)


def measure(name: str, planned: PlannedAudit, options: argparse.Namespace, minutes: float | None) -> None:
    """Run what is missing of an audit; a finished one goes to the leaderboard."""
    folder = options.runs / name
    planned = PlannedAudit(
        planned.command, planned.config, planned.experiment, planned.production, planned.facts, minutes
    )
    summary = planned.run(
        folder,
        resume=(folder / "config.toml").exists(),
        workers=options.workers,
        watcher=Progress(name, options.workers),
        call=f"python -m bench adaptive --only {name}",
    )
    if summary.spending and summary.spending.ended == "budget":
        print(f"{name}: time is up; call again to continue", flush=True)
        return
    files = add([folder], options.to)
    print(f"{name}: {len(files)} cards in {options.to}", flush=True)


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    if options.what == "render":
        print(f"wrote {write_page(options.to, options.page)}")
        return
    began, defenses = time.monotonic(), defenses_of(options.defense)
    if options.what == "cost":
        measure("cost", cost_plan(defenses, options.victims), options, options.minutes)
        return
    together, alone = [each for each in defenses if agrees(each)], [each for each in defenses if not agrees(each)]
    chosen = [case for case in CASES if not options.only or any(fnmatch(case.name, each) for each in options.only)]
    for case in chosen:
        for name, group, clients in (
            (case.name, alone, HELD // case.examples),
            (f"{case.name}-agreed", together, FEW),
        ):
            left = None if options.minutes is None else options.minutes - (time.monotonic() - began) / 60
            if group and (left is None or left > 0):
                measure(name, case.planned(group, options.victims, clients=clients), options, left)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench adaptive")
    parser.add_argument("what", nargs="?", choices=("run", "cost", "render"), default="run")
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"a setting, or a pattern: {names}")
    parser.add_argument("--defense", action="append", default=[], metavar="KIND", choices=[*DEFENSES])
    parser.add_argument("--victims", type=int, default=VICTIMS)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one")
    parser.add_argument("--minutes", type=float, help="start no trial after this time")
    parser.add_argument("--runs", type=Path, default=Path("runs/adaptive"), help="folder of the runs")
    parser.add_argument("--to", type=Path, default=Path("leaderboard"), help="folder of the cards")
    parser.add_argument("--page", type=Path, default=Path("docs/results/adaptive.md"))
    return parser.parse_args(arguments)
