"""The federation on one machine: drives `fl.protocol` with clients in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.rng import global_seed
from leaktight.core.training import Constant
from leaktight.core.types import Broadcast, ClientTrace, Params, RoundTrace, State, Truth, Update
from leaktight.engines.workers import Job, Workers, available_cores, open_workers
from leaktight.fl.client import Client, evaluate
from leaktight.fl.federation import Federation, FederationState, first_state
from leaktight.fl.messages import Ask, Declined, Evaluated, Failed, Outcome, Reply, Request, Train, Trained
from leaktight.fl.protocol import RoundOutcome, carry, federate

Reports: TypeAlias = Mapping[str, Mapping[str, float]]
"""What clients measured about themselves in a round, by client. It reaches the run's files beside the messages."""

AfterRound: TypeAlias = Callable[[RoundOutcome, FederationState], None]
Told: TypeAlias = Callable[[Reports], None]

SCORE_CHUNK = 1000
_NO_MODEL = Broadcast({}, {}, 0)


@dataclass(frozen=True)
class Site:
    """What every worker process holds: all clients with their data, and the server's test set.

    What comes of a job is the client's reply and, beside it, what only the simulation may know: its new state, the
    truth behind its update, its report about itself, and why it declined.
    """

    federation: Federation

    def __call__(self, params: Params, buffers: Params, job: Job) -> Job:
        if "score" in job:
            part = self.federation.dataset.test.part(*job["score"])
            with global_seed(self.federation.rng.child("score", *job["score"])):
                return {"score": evaluate(self.federation.trainer, params, buffers, part)}
        client = self.federation.client(job["client"])
        return self._handle(client, with_model(job["request"], params, buffers), job)

    def _handle(self, client: Client, request: Request, job: Job) -> Job:
        try:
            if isinstance(request, Train):
                done = client.train_round(request, job["state"])
                truth = done.truth() if job["record"] else None
                return {"reply": done.trained, "state": done.state, "truth": truth, "report": dict(done.report)}
            reply, state = client.handle(request, job["state"])
            return {"reply": reply, "state": state}
        except UsageError:
            raise
        except LeaktightError as error:
            return {"reply": Declined(), "state": _after_failure(client, request, job["state"]), "error": str(error)}


def run(
    federation: Federation,
    state: FederationState | None = None,
    *,
    workers: int | None = None,
    after_round: AfterRound | None = None,
    told: Told = lambda reports: None,
    after_client: Callable[[], None] = lambda: None,
    record: Callable[[RoundTrace], None] | None = None,
    until: int | None = None,
    score: bool = True,
) -> FederationState:
    """Play the rounds that are left, from `state` or from the start, and give the final state.

    workers: processes for the clients of a round (None: one per core). The numbers do not depend on it.
    after_round: called with every finished round and the state after it. told: called before that with what clients
    measured about themselves, which no message holds. record: called with the round's trace, truth included.
    until: the first round that is not played (None: none). score: whether models are scored as the plan says.
    """
    state = state or first_state(federation)
    with open_workers(Site(federation), workers or available_cores()) as pool:
        carrier = Carrier(federation, pool, dict(state.clients), after_client, record is not None)

        def finished(outcome: RoundOutcome) -> None:
            if record is not None:
                record(_trace(federation, outcome, carrier.truths))
            told(carrier.reports)
            if after_round is not None:
                after_round(outcome, FederationState(outcome.state, dict(carrier.states)))

        conversation = federate(
            federation.server,
            state.server,
            evaluate=carrier.score if score else None,
            after_round=finished,
            until=until,
        )
        return FederationState(carry(conversation, carrier.exchange), dict(carrier.states))


@dataclass
class Carrier:
    """Moves requests to the workers and replies back, and keeps each client's state in between."""

    federation: Federation
    pool: Workers
    states: dict[str, State] = field(default_factory=dict)
    after_client: Callable[[], None] = lambda: None
    recording: bool = False
    truths: Mapping[str, Truth] = field(default_factory=dict)
    reports: Reports = field(default_factory=dict)

    def exchange(self, requests: Mapping[str, Request]) -> dict[str, Outcome]:
        results: dict[str, Job] = {}
        for broadcast, names in _by_broadcast(requests):
            jobs = [self._job(name, requests[name]) for name in names]
            done = self.pool.run(broadcast.params, broadcast.buffers, jobs, self.after_client)
            results |= dict(zip(names, done, strict=True))
        if any(isinstance(request, Train) for request in requests.values()):
            trained = {name: result for name, result in results.items() if isinstance(result["reply"], Trained)}
            self.reports = {name: result["report"] for name, result in trained.items()}
            self.truths = {name: result["truth"] for name, result in trained.items()} if self.recording else {}
        self.states |= {name: result["state"] for name, result in results.items() if result["state"] is not None}
        return {name: _outcome(results[name]) for name in sorted(results)}

    def _job(self, client: str, request: Request) -> Job:
        return {
            "client": client,
            "request": without_model(request),
            "state": self.states.get(client),
            "record": self.recording,
        }

    def score(self, params: Params, buffers: Params) -> Evaluated:
        total = len(self.federation.dataset.test)
        chunks = [{"score": [start, min(start + SCORE_CHUNK, total)]} for start in range(0, total, SCORE_CHUNK)]
        scores: list[Evaluated] = [done["score"] for done in self.pool.run(params, buffers, chunks, lambda: None)]
        return sum(scores[1:], scores[0])


def _after_failure(client: Client, request: Request, state: State | None) -> State | None:
    try:
        return client.marked(request, state)
    except LeaktightError:
        return state


def _outcome(result: Job) -> Outcome:
    """The reply of a client; who runs a simulation may also know why one declined."""
    reply: Reply = result["reply"]
    return Failed(result["error"]) if isinstance(reply, Declined) else reply


def _by_broadcast(requests: Mapping[str, Request]) -> list[tuple[Broadcast, list[str]]]:
    """Clients grouped by the model sent to them (one group, unless a server treats clients differently)."""
    groups: dict[int, tuple[Broadcast, list[str]]] = {}
    for name, request in sorted(requests.items()):
        broadcast = _NO_MODEL if isinstance(request, Ask) else request.broadcast
        groups.setdefault(id(broadcast), (broadcast, []))[1].append(name)
    return list(groups.values())


def without_model(request: Request) -> Request:
    """The request without its model, which travels once for all clients."""
    return request if isinstance(request, Ask) else with_model(request, {}, {})


def with_model(request: Request, params: Params, buffers: Params) -> Request:
    """The request with this model in it."""
    if isinstance(request, Ask):
        return request
    return replace(request, broadcast=replace(request.broadcast, params=params, buffers=buffers))


def _trace(federation: Federation, outcome: RoundOutcome, truths: Mapping[str, Truth]) -> RoundTrace:
    server = federation.server
    examples = [update.num_examples for update in outcome.updates.values()]
    known = [number for number in examples if number is not None]
    return RoundTrace(
        model=outcome.broadcast.model or federation.trainer.model,
        task=federation.trainer.task,
        broadcast=outcome.broadcast,
        clients={name: ClientTrace(update, truths[name]) for name, update in outcome.updates.items()},
        aggregate=Update(
            tensors=outcome.change,
            kind="delta",
            num_examples=sum(known) if len(known) == len(examples) else None,
            buffers=outcome.state.buffers,
        ),
        local=replace(server.local, learning_rate=outcome.learning_rate, schedule=Constant()),
        defense=server.defense,
        mode=federation.trainer.mode,
        inputs=federation.dataset.inputs,
        num_classes=federation.dataset.num_classes,
    )
