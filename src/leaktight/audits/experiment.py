"""One trial of an audit: run the attacked round, observe it as the threat model allows, attack, score the guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from leaktight.attacks.controls import Control
from leaktight.audits.blind import LabelDraws, blind_labels
from leaktight.audits.decoys import DecoyPool, identify
from leaktight.audits.plan import LABELS_FOUND, Experiment, TrialSpec
from leaktight.audits.requirements import with_labels
from leaktight.audits.trial import (
    Attempted,
    Finished,
    Judged,
    attempt,
    best_of,
    digest_of,
    extractor,
    judge,
    ledger_of,
    oracle_of,
    picture_paths,
    proof_of,
    threat_of,
    without_update,
)
from leaktight.audits.watching import counted_rounds, handed, reconstructed
from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import ActiveAttack, Defense, Progress
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, parameters_of, unpack
from leaktight.core.types import Batch, Broadcast, Observation, Params, Reconstruction, RoundTrace
from leaktight.engines import inprocess
from leaktight.fl.federation import Federation, FederationState, Share
from leaktight.fl.messages import Train
from leaktight.metrics import BuiltMetrics, Resources, build_metrics, label_accuracy, metric_spec
from leaktight.report.words import defense_words
from leaktight.results.schema import SCHEMA_VERSION, Pictures, Rank, TrialHead, TrialOutcome
from leaktight.runtime.executor import Tell
from leaktight.runtime.latest import Latest

PUBLIC_EXAMPLES = 512


class Played(NamedTuple):
    """The rounds of a trial.

    counted: those whose examples are the truth. given: what the attack has seen, one list for each guess.
    seconds: of the victim's last round, training and defense.
    """

    traces: list[RoundTrace]
    counted: list[RoundTrace]
    given: list[list[Observation]]
    seconds: float


class Scene(NamedTuple):
    """What a trial attacks: the federation, its state before the attacked round, and the client."""

    federation: Federation
    state: FederationState
    victim: str


class Chances(TypedDict, total=False):
    """Fields of `TrialOutcome` that compare a guess with guesses without the update."""

    rank: Rank
    decoy_scores: dict[str, tuple[float | None, ...]]
    label_accuracy: float
    label_chance: float
    blind_labels: float


@dataclass(frozen=True)
class TrialRunner:
    """The work of a worker process: trial ids in, trials out.

    Trials of the same victim and defense follow each other, so the rounds of the last ones are kept: they are played
    once for all attacks and controls, and what the client would have sent without the defense is computed once.
    states, accuracy: of the models after training, by `state_key`. failed: by defense, why training it failed.
    """

    experiment: Experiment
    states: Mapping[str, bytes] = field(default_factory=dict)
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _watched(self) -> Latest[tuple[list[RoundTrace], float]]:
        return Latest()

    @cached_property
    def _compared(self) -> Latest[bool]:
        return Latest()

    @cached_property
    def metrics(self) -> BuiltMetrics:
        """The metrics that are the same for every trial."""
        names = [name for name in self.experiment.settings.image_metrics if not metric_spec(name).needs_features]
        return build_metrics(names, Resources(root=self.experiment.data_root))

    def metrics_on(self, model: nn.Module, params: Params, buffers: Params) -> BuiltMetrics:
        """All metrics, for a trial that attacks this network."""
        names = [name for name in self.experiment.settings.image_metrics if metric_spec(name).needs_features]
        if not names:
            return self.metrics
        extract = extractor(model, params, buffers)
        own = build_metrics(names, Resources(root=self.experiment.data_root, extract=extract))
        return BuiltMetrics({**self.metrics.metrics, **own.metrics}, {**self.metrics.unavailable, **own.unavailable})

    @cached_property
    def public_data(self) -> Batch:
        """Up to 512 examples of the test set, which no client holds."""
        test = self.experiment.federation.dataset.test
        place = Rng(self.experiment.seed, key=self.experiment.federation.rng.key).child("public")
        return test.batch(place.secret().permutation(len(test))[:PUBLIC_EXAMPLES])

    @cached_property
    def victims(self) -> list[Share]:
        """The examples of the clients that may be a victim: the targets, who may differ from others, or all clients."""
        shares, targets = self.experiment.federation.shares, self.experiment.settings.targets
        alone = targets and self.experiment.threat.sees == "client"
        return [shares[name] for name in dict.fromkeys(targets)] if alone else list(shares.values())

    @cached_property
    def decoys(self) -> DecoyPool:
        federation = self.experiment.federation
        held = torch.cat([torch.arange(share.start, share.validation) for share in self.victims])
        examples = federation.examples if len(held) == len(federation.examples) else federation.examples.take(held)
        return DecoyPool(examples, federation.dataset.task.one_class)

    @cached_property
    def labels(self) -> LabelDraws:
        targets = self.experiment.federation.examples.targets
        return LabelDraws.of([targets[share.start : share.validation] for share in self.victims])

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
            searches=spec.attack.value.searches,
            track=self.experiment.track,
            trial=spec.trial,
            round=spec.round,
            client=self.experiment.victim(spec.trial),
            seed=self.experiment.seed,
            threat=threat_of(spec.attack.threat(self.experiment.threat)),
            model_accuracy=self.accuracy.get(state_key(spec.defense.name, spec.round)),
        )

    def _run(self, spec: TrialSpec) -> Attempted:
        if spec.defense.name in self.failed:
            name = defense_words(spec.defense.name, spec.defense.settings)
            raise LeaktightError(f"training with {name} failed: {self.failed[spec.defense.name]}")
        scene = self.scene(spec)
        played = self.play(spec, scene)
        return self.scored(spec, scene, played, self.guesses(spec, played.given))

    def scene(self, spec: TrialSpec) -> Scene:
        """The federation of a trial and its state before the attacked round."""
        federation = self.experiment.attacked_federation(spec.defense.value, spec.trial)
        return Scene(federation, self._state(spec, federation), self.experiment.victim(spec.trial))

    def play(self, spec: TrialSpec, scene: Scene) -> Played:
        """Run the rounds of a trial, and observe them as the threat model of its attack allows."""
        threat = spec.attack.threat(self.experiment.threat)
        place = self.experiment.rng(spec.trial).child("attack", spec.attack.name).detached()
        return self._play(
            spec,
            scene.federation,
            scene.state,
            lambda trace: with_labels(spec.attack, threat.observe(trace, scene.victim), rng=place),
        )

    def scored(self, spec: TrialSpec, scene: Scene, played: Played, found: Sequence[Reconstruction]) -> Attempted:
        """Compare the guesses of a trial with the truth and with guesses without the update."""
        experiment, victim, server = self.experiment, scene.victim, scene.state.server
        threat = spec.attack.threat(experiment.threat)
        trace = played.traces[-1]
        members = [victim] if threat.sees == "client" else sorted(trace.clients)
        truth = truth_of(played.counted, members)
        metrics = self.metrics_on(scene.federation.trainer.model, server.params, server.buffers)
        device = scene.federation.setup.device
        judged = best_of([judge(each.guess, truth, metrics, device) for each in found])
        true, guess = picture_paths(spec.id)
        outcome = TrialOutcome(
            ledger=ledger_of(experiment, spec, trace, victim, threat, found[0], played.given),
            examples=digest_of(truth),
            guesses=judged.guesses,
            scores=judged.scores,
            metrics=judged.notes,
            loss=found[0].loss,
            first_loss=found[0].first_loss,
            update_changed=self._update_changed(spec, scene.federation, trace),
            client_seconds=played.seconds,
            images=Pictures(truth=true, guess=guess, size=judged.size, count=judged.count),
            certificate=proof_of(found[0]),
            chosen=found[0].notes.get("chosen"),
            backend=found[0].notes.get("backend"),
            oracle=oracle_of(found[0], truth, judged, metrics, device),
            **self._against_chance(spec, played, members, judged, found[0].labels),
        )
        return outcome, {true: judged.truth, guess: judged.guess}

    def guesses(
        self, spec: TrialSpec, given: Sequence[Sequence[Observation]], progress: Progress | None = None
    ) -> list[Reconstruction]:
        """The guess of an attack; those of a control, which sees no update and may be asked several times.

        They work on copies: what they write reaches neither the judge nor other trials. progress: see
        `Attack.reconstruct`; it is told of a single guess only.
        """
        attack, device = spec.attack.value, self.experiment.federation.setup.device
        rng = self.experiment.rng(spec.trial).child("attack", spec.attack.name).detached()
        victims = self.experiment.victims_of(spec.attack, spec.defense)
        guess = partial(reconstructed, attack, device=device, victims=victims, progress=progress)
        if spec.attack.role == "attack":
            return [guess(deepcopy(given), rng=rng)]
        blind = [[without_update(each) for each in seen] for seen in deepcopy(given)]
        draws = attack.draws if isinstance(attack, Control) else 1
        return [guess(blind, rng=rng.child("draw", number) if number else rng) for number in range(draws)]

    def _against_chance(
        self, spec: TrialSpec, played: Played, members: Sequence[str], judged: Judged, read: Tensor | None
    ) -> Chances:
        """What an attack's guess has of the victim, beyond what a guess without the update would have.

        read: labels that an attack read beside its guess, which has given ones.
        Decoys and simulated labels depend on the trial's number alone, and come from a stream that no attack sees.
        """
        if spec.attack.role == "control":
            return {}
        truth, place = truth_of(played.counted, members), self.experiment.rng(spec.trial)
        behind = truth_of(played.traces, members).inputs
        decoys = self.decoys.draw(truth, behind, judges_stream(place.child("decoys")))
        chances = Chances()
        if decoys is not None:
            chances["rank"], chances["decoy_scores"] = identify(judged.scored.inputs, truth.inputs, decoys)
        labels = judged.scored.targets if spec.attack.labels_from in LABELS_FOUND else read
        if labels is not None:
            labels = labels[: len(truth)]
            sizes = [len(truth_of(played.counted, [name])) for name in members]
            blind = blind_labels(labels, truth.targets, sizes, self.labels, judges_stream(place.child("labels")))
            chances["label_accuracy"] = label_accuracy(labels, truth.targets)
            chances["label_chance"], chances["blind_labels"] = blind
        return chances

    def _play(
        self,
        spec: TrialSpec,
        federation: Federation,
        state: FederationState,
        observe: Callable[[RoundTrace], Observation],
    ) -> Played:
        """Run the watched rounds, or all that an active attack asks for."""
        attack, victim = spec.attack.value, self.experiment.victim(spec.trial)
        if not isinstance(attack, ActiveAttack):
            watched, seconds = self._watched.get(_round_of(spec), lambda: self._watch(spec, federation, state))
            settings = self.experiment.settings
            given = handed(settings, attack, [observe(each) for each in watched])
            return Played(watched, counted_rounds(settings, watched), given, seconds)
        rng = self.experiment.rng(spec.trial).child("tamper", spec.attack.name).detached()
        traces: list[RoundTrace] = []
        seen: list[Observation] = []
        seconds = 0.0
        honest, clients = state.server, state.clients
        while True:
            asked = replace(honest, round=honest.round + len(seen))
            sent = attack.tamper(
                Broadcast(asked.params, asked.buffers, asked.round, federation.trainer.model), seen, rng=rng
            )
            if sent is None:
                return Played(traces, traces[-1:], [seen], seconds)
            changed = tampered(federation, replace(state, server=asked, clients=clients), sent)
            trace, after, seconds = self._round(*changed, victim)
            clients = after.clients
            traces.append(trace)
            seen.append(observe(trace))

    def _watch(self, spec: TrialSpec, federation: Federation, state: FederationState) -> tuple[list[RoundTrace], float]:
        """Run the watched rounds, all but the last with as many clients as in training. Gives also the seconds of the
        victim in the last."""
        victim, seconds = self.experiment.victim(spec.trial), 0.0
        whole = replace(federation, drawn=self.experiment.members(spec.trial))
        traces: list[RoundTrace] = []
        for left in reversed(range(self.experiment.settings.watched)):
            trace, state, seconds = self._round(whole if left else federation, state, victim)
            traces.append(trace)
        return traces, seconds

    def _round(
        self, federation: Federation, state: FederationState, victim: str
    ) -> tuple[RoundTrace, FederationState, float]:
        """Run the next round of this state. Gives also the state after it and the seconds of the victim."""
        traces: list[RoundTrace] = []
        reports: dict[str, Mapping[str, float]] = {}
        until = state.server.round + 1
        longer = replace(federation, plan=replace(federation.plan, rounds=max(federation.plan.rounds, until)))
        after = inprocess.run(
            longer, state, workers=1, until=until, on_reports=reports.update, record=traces.append, score=False
        )
        return replace(traces[0], public_data=self.public_data), after, reports[victim]["seconds"]

    def _state(self, spec: TrialSpec, federation: Federation) -> FederationState:
        packed = self.states.get(state_key(spec.defense.name, spec.round))
        return federation.first_state() if packed is None else FederationState.restored(unpack(packed))

    def _update_changed(self, spec: TrialSpec, federation: Federation, trace: RoundTrace) -> bool:
        """Whether the victim sent another update than it would have sent without the defense."""
        victim = self.experiment.victim(spec.trial)
        if isinstance(spec.attack.value, ActiveAttack):  # the round is its own
            return self._changed(spec, federation, trace, victim)
        return self._compared.get(_round_of(spec), lambda: self._changed(spec, federation, trace, victim))

    def _changed(self, spec: TrialSpec, federation: Federation, trace: RoundTrace, victim: str) -> bool:
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


def judges_stream(place: Rng) -> np.random.Generator:
    """A stream for the judge's own draws, which cannot be computed from a seed."""
    return np.random.default_rng(int.from_bytes(place.secret_bytes(), "big"))


def tampered(federation: Federation, state: FederationState, sent: Broadcast) -> tuple[Federation, FederationState]:
    """The federation and its state before a round in which the server sends the broadcast `sent`."""
    other = None if sent.model is federation.trainer.model else sent.model
    server = replace(state.server, params=sent.params, buffers=sent.buffers)
    if sent.params.keys() != state.server.params.keys():
        # The aggregator's state belongs to the tensors of the old network.
        server = replace(server, aggregator=federation.setup.aggregator.start(sent.params), agreed=False)
    return replace(federation, network=other), replace(state, server=server)


def _round_of(spec: TrialSpec) -> tuple[str, int, int]:
    """What the honest rounds of a trial depend on."""
    return spec.defense.name, spec.round, spec.trial


def state_key(defense: str, round_index: int) -> str:
    return f"{defense}@{round_index}"


def truth_of(rounds: Sequence[RoundTrace], members: Sequence[str]) -> Batch:
    """The examples of these clients in the rounds, concatenated."""
    examples = [trace.clients[name].truth.examples for trace in rounds for name in members]
    return Batch(torch.cat([each.inputs for each in examples]), torch.cat([each.targets for each in examples]))


def _equal(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    return list(parameters_of(model)), list(buffers_of(model))
