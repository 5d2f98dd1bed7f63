"""A federation on one machine: runs `fl.protocol` with clients in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.faults import raise_fault
from leaktight.core.rng import global_seed
from leaktight.core.tensors import flatten_state, num_bytes
from leaktight.core.training import Constant
from leaktight.core.types import Broadcast, ClientTrace, Params, RoundTrace, State, Truth, Update
from leaktight.fl.client import Client
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.local import evaluate
from leaktight.fl.messages import Ask, Declined, Evaluated, Failed, Outcome, Reply, Request, Train, Trained
from leaktight.fl.protocol import RoundOutcome, carry, federate
from leaktight.fl.state import ClientState
from leaktight.runtime.allocator import give_back
from leaktight.runtime.executor import Tell, Workers, in_order
from leaktight.runtime.processes import on_this_machine, one_thread
from leaktight.runtime.sharing import in_file

Reports: TypeAlias = Mapping[str, Mapping[str, float]]
"""Figures that clients measured in a round, by client and name. They are not part of any message."""

AfterRound: TypeAlias = Callable[[RoundOutcome, FederationState], None]
OnReports: TypeAlias = Callable[[Reports], None]

SCORE_CHUNK = 1000
LARGE_QUESTION = 1 << 20
"""Bytes in a question's tensors from which on workers share them, as they do models; small ones travel with the job."""
MOST_HELD = 1 << 30
"""Bytes of a round's updates that are held in memory; those of more are kept in files until they are combined."""


@dataclass(frozen=True)
class ClientJob:
    """A request to a client, and the client's state. record: also return the truth behind an update."""

    client: str
    request: Request
    state: ClientState | None
    record: bool


@dataclass(frozen=True)
class ScoreJob:
    """Score a model on examples `start` to `stop` of the server's test set."""

    model: Broadcast
    start: int
    stop: int


@dataclass(frozen=True)
class JobDone:
    """A client's reply or a score; the other fields are known to the simulation only.

    state: the client's after the request. report: figures that it measured. error: why it declined.
    """

    reply: Reply
    state: ClientState | None = None
    truth: Truth | None = None
    report: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


RoundWorkers: TypeAlias = Workers[ClientJob | ScoreJob, object, JobDone]


@dataclass(frozen=True)
class RoundWork:
    """The work of a worker process, which holds all clients with their data, and the server's test set."""

    federation: Federation

    def __call__(self, job: ClientJob | ScoreJob, tell: Tell[object]) -> JobDone:
        return self._score(job) if isinstance(job, ScoreJob) else answered(self.federation.client(job.client), job)

    def _score(self, job: ScoreJob) -> JobDone:
        part = self.federation.dataset.test.part(job.start, job.stop)
        with global_seed(self.federation.rng.child("score", job.start, job.stop)):
            setup, model = self.federation.setup, job.model
            return JobDone(evaluate(setup.trainer, model.params, model.buffers, part, device=setup.device))


def answered(client: Client, job: ClientJob) -> JobDone:
    """A client's answer. Usage errors and faults of the machine are raised; after any other the client declines."""
    try:
        if isinstance(job.request, Train):
            done = client.train_round(job.request, job.state)
            return JobDone(done.trained, done.state, done.truth() if job.record else None, done.report)
        return JobDone(*client.handle(job.request, job.state))
    except SystemExit as error:  # of a method; it would end the run as if that were finished
        raise LeaktightError(f"SystemExit: {error}; a method must not end the process") from error
    except UsageError:
        raise
    except LeaktightError as error:
        raise_fault(error)
        return JobDone(Declined(), _after_failure(client, job), error=str(error))


def run(
    federation: Federation,
    state: FederationState | None = None,
    *,
    workers: int | None = None,
    after_round: AfterRound | None = None,
    on_reports: OnReports = lambda reports: None,
    after_client: Callable[[], None] = lambda: None,
    record: Callable[[RoundTrace], None] | None = None,
    until: int | None = None,
    score: bool = True,
) -> FederationState:
    """Run the remaining rounds, from `state` or from the start, and return the final state.

    workers: processes for the clients of a round; None for one per core. Results do not depend on it.
    after_round: called with every finished round and the state after it. on_reports: called before that with the
    clients' figures. record: called with the round's trace, truth included. until: stop before this round, counted from
    0; None to run all. score: whether to score models as the plan says.
    """
    state = state or federation.first_state()
    with one_thread(), on_this_machine(workers).start(RoundWork(federation)) as started:
        carrier = Carrier(federation, started, dict(state.clients), after_client, record is not None)

        def finished(outcome: RoundOutcome) -> None:
            if record is not None:
                record(_trace(federation, outcome, carrier.truths))
            on_reports(carrier.reports)
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
    """Sends requests to the workers, returns the replies, and keeps each client's state between requests."""

    federation: Federation
    workers: RoundWorkers
    states: dict[str, ClientState] = field(default_factory=dict)
    after_client: Callable[[], None] = lambda: None
    recording: bool = False
    truths: Mapping[str, Truth] = field(default_factory=dict)
    reports: Reports = field(default_factory=dict)

    def exchange(self, requests: Mapping[str, Request]) -> dict[str, Outcome]:
        names = sorted(requests)
        jobs = [ClientJob(name, requests[name], self.states.get(name), self.recording) for name in names]
        large = _update_bytes(requests) > MOST_HELD
        ran = self.workers.run(jobs, shared=_shared(requests))
        done = ((place, _in_file(result) if large else result) for place, result in ran)
        results = dict(zip(names, in_order(done, lambda place, result: self.after_client()), strict=True))
        if any(isinstance(request, Train) for request in requests.values()):
            trained = {name: result for name, result in results.items() if isinstance(result.reply, Trained)}
            self.reports = {name: result.report for name, result in trained.items()}
            self.truths = {name: result.truth for name, result in trained.items() if result.truth is not None}
        self.states |= {name: result.state for name, result in results.items() if result.state is not None}
        return {name: _outcome(result) for name, result in results.items()}

    def score(self, params: Params, buffers: Params) -> Evaluated:
        model, total = Broadcast(params, buffers, 0), len(self.federation.dataset.test)
        jobs = [ScoreJob(model, start, min(start + SCORE_CHUNK, total)) for start in range(0, total, SCORE_CHUNK)]
        done = in_order(self.workers.run(jobs, shared=[model]))
        scores = [each.reply for each in done if isinstance(each.reply, Evaluated)]
        return sum(scores[1:], scores[0])


def _shared(requests: Mapping[str, Request]) -> list[object]:
    """The distinct models sent to clients, one unless a server sends them different ones, and large questions."""
    sent = [each.question.payload if isinstance(each, Ask) else each.broadcast for each in requests.values()]
    distinct = {id(value): value for value in sent}.values()
    return [value for value in distinct if isinstance(value, Broadcast) or _is_large(value)]


def _update_bytes(requests: Mapping[str, Request]) -> int:
    """About the size of all updates that were asked for: that of the models sent."""
    return sum(num_bytes(each.broadcast.params) for each in requests.values() if isinstance(each, Train))


def _in_file(result: JobDone) -> JobDone:
    """The same, with the tensors of an update in a file, and nothing left of the memory that they had."""
    if not isinstance(result.reply, Trained):
        return result
    update = result.reply.update
    kept = replace(result, reply=Trained(replace(update, tensors=in_file(update.tensors))))
    give_back()
    return kept


def _is_large(payload: State) -> bool:
    return num_bytes(flatten_state(payload)[0]) >= LARGE_QUESTION


def _after_failure(client: Client, job: ClientJob) -> ClientState | None:
    try:
        return client.marked(job.request, job.state)
    except LeaktightError:
        return job.state


def _outcome(result: JobDone) -> Outcome:
    """The reply of a client, or the reason why it declined, which a simulation may know."""
    return Failed(result.error) if isinstance(result.reply, Declined) else result.reply


def _trace(federation: Federation, outcome: RoundOutcome, truths: Mapping[str, Truth]) -> RoundTrace:
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
        local=replace(federation.trainer.local, learning_rate=outcome.learning_rate, schedule=Constant()),
        defense=federation.setup.defense,
        mode=federation.trainer.mode,
        inputs=federation.dataset.inputs,
        num_classes=federation.dataset.num_classes,
    )
