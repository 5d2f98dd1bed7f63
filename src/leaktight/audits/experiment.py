"""One trial of an audit: run the attacked round, observe it as the threat model allows, attack, score the guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.audits.trial import (
    LABELS_FOUND,
    Attempted,
    Finished,
    attempt,
    judge,
    ledger_of,
    picture_paths,
    threat_of,
)
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.protocols import ActiveAttack, Defense
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, parameters_of, unpack
from leaktight.core.types import Batch, Broadcast, Observation, Params, RoundTrace
from leaktight.engines import inprocess
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.messages import Train
from leaktight.metrics import BuiltMetrics, Resources, build_metrics
from leaktight.results.schema import SCHEMA_VERSION, Pictures, TrialHead, TrialOutcome
from leaktight.runtime.executor import Tell

PUBLIC_EXAMPLES = 512


@dataclass(frozen=True)
class TrialRunner:
    """The work of a worker process: trial ids in, trials out.

    states, accuracy: of the models after training, by `state_key`. failed: by defense, why training it failed.
    """

    experiment: Experiment
    states: Mapping[str, bytes] = field(default_factory=dict)
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> BuiltMetrics:
        return build_metrics(self.experiment.settings.image_metrics, Resources(root=self.experiment.data_root))

    @cached_property
    def public_data(self) -> Batch:
        """Up to 512 examples of the test set, which no client holds."""
        test = self.experiment.federation.dataset.test
        order = torch.randperm(len(test), generator=Rng(self.experiment.seed).child("public").public())
        return test.batch(order[:PUBLIC_EXAMPLES])

    def __call__(self, job: str, tell: Tell[object]) -> Finished:
        """Run the trial with the id `job`."""
        spec = self.experiment.by_id[job]
        return attempt(self._head(spec), lambda: self._run(spec))

    def _head(self, spec: TrialSpec) -> TrialHead:
        return TrialHead(
            schema_version=SCHEMA_VERSION,
            id=spec.id,
            attack=spec.attack.name,
            attack_settings=dict(spec.attack.settings),
            role=spec.attack.role,
            defense=spec.defense.name,
            defense_settings=dict(spec.defense.settings),
            adaptive=spec.attack.adaptive,
            track=self.experiment.track,
            trial=spec.trial,
            round=spec.round,
            client=self.experiment.victim(spec.trial),
            seed=self.experiment.seed,
            threat=threat_of(spec.attack.threat(self.experiment.threat)),
            model_accuracy=self.accuracy.get(state_key(spec.defense.name, spec.round)),
        )

    def _run(self, spec: TrialSpec) -> Attempted:
        experiment = self.experiment
        if spec.defense.name in self.failed:
            raise LeaktightError(f"training with {spec.defense.name} failed: {self.failed[spec.defense.name]}")
        federation = experiment.attacked_federation(spec.defense.value, spec.trial)
        victim = experiment.victim(spec.trial)
        threat = spec.attack.threat(experiment.threat)
        trace, seen = self._play(spec, federation, lambda trace: threat.observe(trace, victim))
        rng = experiment.rng(spec.trial).child("attack", spec.attack.name).detached()
        found = spec.attack.value.reconstruct(seen, rng=rng)
        truth = truth_of(trace, [victim] if threat.sees == "client" else sorted(trace.clients))
        judged = judge(found.guess, truth, self.metrics)
        ledger = ledger_of(experiment, spec, trace, victim, threat, found, queries=len(seen))
        true, guess = picture_paths(spec.id)
        outcome = TrialOutcome(
            ledger=ledger,
            scores=judged.scores,
            metrics=judged.notes,
            label_accuracy=judged.label_accuracy if ledger.labels in LABELS_FOUND else None,
            loss=found.loss,
            first_loss=found.first_loss,
            update_changed=self._changed(spec, federation, trace, victim),
            images=Pictures(truth=true, guess=guess, size=judged.size, count=judged.count),
        )
        return outcome, {true: judged.truth, guess: judged.guess}

    def _play(
        self, spec: TrialSpec, federation: Federation, observe: Callable[[RoundTrace], Observation]
    ) -> tuple[RoundTrace, list[Observation]]:
        """Run the attacked round, or all that an active attack asks for. Gives the last one and all observations."""
        state = self._state(spec, federation)
        attack = spec.attack.value
        if not isinstance(attack, ActiveAttack):
            trace, _ = self._round(federation, state)
            return trace, [observe(trace)]
        if self.experiment.threat.server != "malicious":
            raise UsageError(
                f'{spec.attack.name} changes the model that the server sends; set threat.server = "malicious"'
            )
        rng = self.experiment.rng(spec.trial).child("tamper", spec.attack.name).detached()
        traces: list[RoundTrace] = []
        seen: list[Observation] = []
        honest, clients = state.server, state.clients
        while True:
            asked = replace(honest, round=honest.round + len(seen))
            sent = attack.tamper(
                Broadcast(asked.params, asked.buffers, asked.round, federation.trainer.model), seen, rng=rng
            )
            if sent is None:
                return traces[-1], seen
            trace, after = self._round(*tampered(federation, replace(state, server=asked, clients=clients), sent))
            clients = after.clients
            traces.append(trace)
            seen.append(observe(trace))

    def _round(self, federation: Federation, state: FederationState) -> tuple[RoundTrace, FederationState]:
        """Run the next round of this state."""
        traces: list[RoundTrace] = []
        until = state.server.round + 1
        longer = replace(federation, plan=replace(federation.plan, rounds=max(federation.plan.rounds, until)))
        after = inprocess.run(longer, state, workers=1, until=until, record=traces.append, score=False)
        return replace(traces[0], public_data=self.public_data), after

    def _state(self, spec: TrialSpec, federation: Federation) -> FederationState:
        packed = self.states.get(state_key(spec.defense.name, spec.round))
        return federation.first_state() if packed is None else FederationState.restored(unpack(packed))

    def _changed(self, spec: TrialSpec, federation: Federation, trace: RoundTrace, victim: str) -> bool:
        """Whether the client sent another update than it would have sent without the defense."""
        if trace.clients[victim].update.sealed is not None:
            return True  # an encrypted or masked update cannot be compared
        plain = self.experiment.attacked_federation(Defense(), spec.trial)
        sent = trace.clients[victim].update.tensors
        if _names(federation.trainer.model) != _names(plain.trainer.model):
            return True  # the defense changed the network itself
        aggregator, sizes = plain.setup.aggregator, plain.sizes
        scale = aggregator.loss_scale(sizes[victim], list(sizes.values()))
        request = Train(trace.broadcast, trace.local.learning_rate, aggregator.update_kind, scale)
        return not _equal(plain.client(victim).train_round(request, None).trained.update.tensors, sent)


def tampered(federation: Federation, state: FederationState, sent: Broadcast) -> tuple[Federation, FederationState]:
    """The federation and its state before a round in which the server sends the broadcast `sent`."""
    other = None if sent.model is federation.trainer.model else sent.model
    server = replace(state.server, params=sent.params, buffers=sent.buffers)
    if sent.params.keys() != state.server.params.keys():
        # The aggregator's state belongs to the tensors of the old network.
        server = replace(server, aggregator=federation.setup.aggregator.start(sent.params), agreed=False)
    return replace(federation, network=other), replace(state, server=server)


def state_key(defense: str, round_index: int) -> str:
    return f"{defense}@{round_index}"


def truth_of(trace: RoundTrace, members: Sequence[str]) -> Batch:
    """The examples of these clients in the round, concatenated."""
    examples = [trace.clients[name].truth.examples for name in members]
    return Batch(torch.cat([each.inputs for each in examples]), torch.cat([each.targets for each in examples]))


def _equal(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    return list(parameters_of(model)), list(buffers_of(model))
