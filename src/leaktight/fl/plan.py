"""What is fixed before the first round: the settings that server and clients share, and the plan of the rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from leaktight.core.devices import CPU
from leaktight.core.errors import OutsideBudgetError, UsageError, require_at_least
from leaktight.core.protocols import Aggregator, Defense
from leaktight.core.rng import Rng
from leaktight.fl.local import Trainer
from leaktight.fl.robust import Robust


@dataclass(frozen=True)
class Setup:
    """The settings of a federation, shared by its server and all its clients.

    trainer: the network as prepared by the defense, its task and mode, local training, the defense.
    device: where clients train and models are scored. All else, messages included, is on the CPU.
    """

    trainer: Trainer
    aggregator: Aggregator
    device: torch.device = CPU

    @property
    def defense(self) -> Defense:
        return self.trainer.defense

    def with_defense(self, defense: Defense, *, rng: Rng) -> Setup:
        """The same with this defense, and with the network prepared by it."""
        model = defense.prepare(copy.deepcopy(self.trainer.model), rng=rng)
        return replace(self, trainer=replace(self.trainer, model=model, defense=defense))

    def check_rule(self) -> None:
        """Raise UsageError if the defense needs a mean and the aggregator computes something else."""
        reason = self.defense.needs_mean
        if reason is not None and isinstance(self.aggregator, Robust):
            rule, own = type(self.aggregator).__name__, type(self.defense).__name__
            raise UsageError(
                f"{own} cannot be combined with {rule}: {reason}; choose an aggregator that takes the mean, such as "
                "fedavg, or another defense"
            )

    def check_counted(self, scores_on: str | None) -> None:
        """Raise `OutsideBudgetError` if a method releases what the defense's privacy budget does not count."""
        defense, aggregator = self.defense, self.aggregator
        if not defense.private:
            return
        own = type(defense).__name__
        exact = [name for name in sorted(aggregator.needs) if name != "num_examples"]
        exact += [kind for kind, asked in (*aggregator.questions.items(), *defense.questions.items()) if asked.exact]
        if exact:
            raise OutsideBudgetError(
                f"{type(aggregator).__name__} has clients send figures of their data ({', '.join(exact)}) that the "
                f"epsilon of {own} does not count; choose another aggregator, such as fedavg, or another defense"
            )
        if scores_on is not None:
            raise OutsideBudgetError(
                f"clients would score models on {scores_on} examples, which the epsilon of {own} does not count; "
                'set federation.evaluate = "server", with a defense that needs no private parts'
            )


@dataclass(frozen=True, kw_only=True)
class FederationPlan:
    """The plan of a federation's rounds.

    rounds: their number, >= 1. per_round: number of clients drawn in each round; None: all.
    min_clients: a round fails if fewer clients answer; None: all that were drawn.
    evaluate: the global model is scored on the "server"'s test set or on the "clients"' validation examples. With a
        defense whose private parts the model needs, every client scores the server's test set with its own.
    evaluate_every: number of rounds between two scores; the last round is always scored.
    timeout: seconds, > 0, to wait for the answers of remote clients (Flower); those without an answer have failed.
        None: no limit.
    keep_checkpoints: how many rounds are kept on disk, the last one included, >= 1: a run can go back to any of them.
        Each takes the size of the model and of the clients' private states; on Flower, at a node, of its replies.
    norm_limit: an update that is longer than this many times the median of its round, > 1, is not used. From three
        plain updates on; None: such updates are used, and those beyond ten times the median flagged.
    """

    rounds: int = 10
    per_round: int | None = None
    min_clients: int | None = None
    evaluate: Literal["server", "clients"] = "server"
    evaluate_every: int = 1
    timeout: float | None = None
    keep_checkpoints: int = 3
    norm_limit: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"expected timeout > 0 seconds, got {self.timeout}")
        if self.norm_limit is not None and not 1 < self.norm_limit < math.inf:
            raise ValueError(f"expected norm_limit > 1, got {self.norm_limit}")
        require_at_least(1, rounds=self.rounds, per_round=self.per_round)
        require_at_least(1, min_clients=self.min_clients, evaluate_every=self.evaluate_every)
        require_at_least(1, keep_checkpoints=self.keep_checkpoints)
        if self.per_round and self.min_clients and self.min_clients > self.per_round:
            raise ValueError(f"expected min_clients <= per_round, got {self.min_clients} > {self.per_round}")

    def scores_round(self, round_index: int) -> bool:
        return (round_index + 1) % self.evaluate_every == 0 or round_index + 1 == self.rounds


@dataclass(frozen=True)
class Server:
    """The server's settings. sizes: number of training examples by client.

    drawn: the clients of every round; None: drawn at random. network: what a malicious server sends in place of the
    agreed network.
    """

    setup: Setup
    sizes: Mapping[str, int]
    plan: FederationPlan
    rng: Rng
    drawn: tuple[str, ...] | None = None
    network: nn.Module | None = None

    def __post_init__(self) -> None:
        drawn = self.plan.per_round or len(self.sizes)
        if drawn > len(self.sizes):
            raise UsageError(f"expected per_round <= clients, got per_round {drawn} > {len(self.sizes)} clients")
        if (self.plan.min_clients or 0) > drawn:
            raise UsageError(f"expected min_clients <= clients, got {self.plan.min_clients} > {drawn}")
        smallest, local = min(self.sizes, key=self.sizes.__getitem__), self.setup.trainer.local
        if local.batch_size > self.sizes[smallest]:
            raise UsageError(
                f"expected batch_size <= each client's examples, got batch_size {local.batch_size} > "
                f"{self.sizes[smallest]} of {smallest}; lower local.batch_size or give clients more data"
            )
        if self.setup.aggregator.update_kind == "gradient" and local.num_steps(max(self.sizes.values())) != 1:
            raise UsageError(
                "a gradient update is one local step; set local.steps = 1, or choose an aggregator of model changes"
            )
        self.setup.check_rule()
        if self.plan.norm_limit is not None and self.setup.aggregator.sealed:
            raise UsageError(
                "norm_limit compares the norms of updates, which a server cannot see where they are encrypted; leave "
                "it out, or choose an aggregator of plain updates"
            )
        self.setup.check_counted(self.scores_on)
        if self.drawn is None and len(self.sizes) > 1:
            least = self.plan.min_clients or drawn
            reason = self.setup.aggregator.why_too_few(least)
            if reason is not None:
                named = "min_clients" if self.plan.min_clients else "clients per round"
                raise UsageError(f"{reason} (federation: {named} = {least})")

    @property
    def scores_on(self) -> Literal["validation", "test"] | None:
        """The examples on which clients score the global model; None if only the server scores it."""
        if self.plan.evaluate == "clients":
            return "validation"
        return "test" if self.setup.defense.private_parts else None
