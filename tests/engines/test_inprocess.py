from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from leaktight.core.errors import LeaktightError, MachineError, NotDisclosedError, RoundFailedError, UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, digest, num_bytes, parameters_of
from leaktight.core.threat import Knowledge, ThreatModel, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Params, RoundTrace, State
from leaktight.engines import inprocess
from leaktight.engines.inprocess import RoundWork, run
from leaktight.fl import accept
from leaktight.fl.aggregators import FedAvg, FedSgd, ServerAdam
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.runtime.sharing import in_file, without_examples

MakeFederation = Callable[..., Federation]


def whole(state: FederationState) -> dict[str, torch.Tensor]:
    return {**state.server.params, **state.server.buffers}


def test_one_process_and_many_give_the_same_bits(make_federation: MakeFederation) -> None:
    federation = make_federation(aggregator=ServerAdam())
    alone: list[RoundOutcome] = []
    shared: list[RoundOutcome] = []
    one = run(federation, workers=1, after_round=lambda outcome, state: alone.append(outcome))
    many = run(federation, workers=2, after_round=lambda outcome, state: shared.append(outcome))
    assert digest(whole(one)) == digest(whole(many))
    assert [outcome.score for outcome in alone] == [outcome.score for outcome in shared]
    assert digest(whole(one)) != digest(whole(federation.first_state()))


def test_workers_are_given_the_examples_once(make_federation: MakeFederation) -> None:
    federation = make_federation()
    _, parts = without_examples(RoundWork(federation))
    assert len(parts) == 2, "those of the clients, and those of the server's test"
    assert len(federation.examples) == max(share.stop for share in federation.shares.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_updates_that_are_kept_in_files_give_the_same_bits(
    make_federation: MakeFederation, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    federation = make_federation(aggregator=ServerAdam())
    held = run(federation, workers=1)
    kept: list[Params] = []

    def counted(tensors: Params) -> Params:
        kept.append(tensors)
        return in_file(tensors)

    monkeypatch.setattr(inprocess, "in_file", counted)
    assert digest(whole(run(federation, workers=workers))) == digest(whole(held))
    assert not kept, "a small federation stays in memory"
    drawn = federation.plan.per_round or len(federation.shares)
    monkeypatch.setattr(inprocess, "MOST_HELD", drawn * num_bytes(federation.first_state().server.params) - 1)
    assert digest(whole(run(federation, workers=workers))) == digest(whole(held))
    assert len(kept) == drawn * federation.plan.rounds


def test_stopping_and_going_on_gives_the_same_bits(make_federation: MakeFederation) -> None:
    federation = make_federation(aggregator=ServerAdam())
    states: list[FederationState] = []
    final = run(federation, workers=1, after_round=lambda outcome, state: states.append(state))
    resumed = run(federation, states[0], workers=1)
    assert digest(whole(resumed)) == digest(whole(final))


def test_it_learns(make_federation: MakeFederation) -> None:
    outcomes: list[RoundOutcome] = []
    run(
        make_federation(plan=FederationPlan(rounds=15)),
        workers=1,
        after_round=lambda outcome, state: outcomes.append(outcome),
    )
    assert outcomes[-1].score is not None
    assert outcomes[-1].score.num_examples == 1500
    assert outcomes[-1].score.accuracy > 0.9


def test_one_client_and_one_step_is_a_plain_pytorch_step(make_federation: MakeFederation) -> None:
    """FedSGD with one client is one step of gradient descent on its batch."""
    traces: list[RoundTrace] = []
    federation = make_federation(
        local=LocalTraining(steps=1, batch_size=24),
        aggregator=FedSgd(learning_rate=0.5),
        plan=FederationPlan(rounds=1),
        clients=1,
        dropout=0.0,
    )
    final = run(federation, workers=1, record=traces.append)
    (client,) = traces[0].clients.values()
    (step,) = client.truth.steps
    model = copy.deepcopy(federation.trainer.model).train()
    F.cross_entropy(model(client.truth.examples.inputs[step]), client.truth.examples.targets[step]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(final.server.params[name], parameter.detach() - 0.5 * parameter.grad)
    for name, buffer in buffers_of(model).items():
        torch.testing.assert_close(final.server.buffers[name], buffer)


def test_the_federation_is_not_changed_by_running(make_federation: MakeFederation) -> None:
    federation = make_federation()
    before, generator = digest(federation.trainer.model.state_dict()), torch.get_rng_state()
    run(federation, workers=1)
    assert digest(federation.trainer.model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), generator)


@dataclass(frozen=True)
class FailsSometimes(Defense):
    """Cannot take part in round 1."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if step.round == 1 and rng.path[rng.path.index("client") + 1] == "client-002":
            raise LeaktightError("out of battery")
        return step.gradient, state


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_fails_is_named_and_the_rest_goes_on(make_federation: MakeFederation, workers: int) -> None:
    outcomes: list[RoundOutcome] = []
    federation = make_federation(defense=FailsSometimes(), plan=FederationPlan(rounds=3, min_clients=4))
    run(federation, workers=workers, after_round=lambda outcome, state: outcomes.append(outcome))
    assert [dict(outcome.failures) for outcome in outcomes] == [{}, {"client-002": "out of battery"}, {}]
    with pytest.raises(RoundFailedError, match="client-002: out of battery"):
        run(make_federation(defense=FailsSometimes(), plan=FederationPlan(rounds=3)), workers=workers)


def observed(make_federation: MakeFederation, **settings: Any) -> RoundTrace:
    traces: list[RoundTrace] = []
    run(make_federation(plan=FederationPlan(rounds=1), **settings), workers=1, record=traces.append)
    return traces[0]


def test_a_count_that_is_not_sent_is_not_told_by_labels_either(make_federation: MakeFederation) -> None:
    trace = observed(make_federation, aggregator=FedAvg(scheme="I"))
    seen = ThreatModel(knows=frozenset({Knowledge.LABELS})).observe(trace, "client-001")
    truth = trace.clients["client-001"].truth.examples.targets
    assert seen.batch_size is seen.update.num_examples is None
    assert seen.labels is not None
    assert seen.labels.tolist() == sorted(set(truth.tolist()))
    assert len(seen.labels) < len(truth)


def test_the_attacker_sees_only_what_the_threat_model_gives(make_federation: MakeFederation) -> None:
    trace = observed(make_federation)
    blind = ThreatModel(knows=frozenset()).observe(trace, "client-001")
    for name in ("labels", "local_training", "defense", "public_data"):
        assert getattr(blind, name) is None
    assert blind.update.buffers is None
    sent = trace.clients["client-001"].update.num_examples
    assert blind.batch_size == blind.update.num_examples == sent, "FedAvg has clients say how many there are"
    assert digest(blind.update.tensors) == digest(trace.clients["client-001"].update.tensors)
    seeing = ThreatModel(knows=frozenset(Knowledge) - {Knowledge.PUBLIC_DATA}).observe(trace, "client-001")
    truth = trace.clients["client-001"].truth
    assert seeing.labels is not None
    assert seeing.labels.tolist() == sorted(truth.examples.targets.tolist())
    assert seeing.batch_size == len(truth.examples)
    assert seeing.local_training is not None
    assert seeing.local_training.learning_rate == 0.1
    assert seeing.defense == Defense()
    require(seeing, Knowledge.LABELS, Knowledge.BUFFERS)
    with pytest.raises(NotDisclosedError, match="'buffers'"):
        require(blind, Knowledge.BUFFERS)
    with pytest.raises(NotDisclosedError, match="'public_data'"):
        require(seeing, Knowledge.PUBLIC_DATA)


def test_under_secure_aggregation_only_the_sum_is_seen(make_federation: MakeFederation) -> None:
    trace = observed(make_federation)
    seen = ThreatModel(sees="aggregate", knows=frozenset(Knowledge)).observe(trace, "client-001")
    assert seen.labels is not None
    assert len(seen.labels) == seen.batch_size == sum(len(c.truth.examples) for c in trace.clients.values())
    weights = {name: client.update.num_examples or 0 for name, client in trace.clients.items()}
    for key in parameters_of(trace.model):
        mean = sum(weights[n] * c.update.tensors[key] for n, c in trace.clients.items()) / sum(weights.values())
        torch.testing.assert_close(seen.update.tensors[key], mean)


def test_a_client_that_took_no_part_cannot_be_observed(make_federation: MakeFederation) -> None:
    with pytest.raises(UsageError, match="did you mean 'client-001'"):
        ThreatModel().observe(observed(make_federation), "client-0011")


def test_a_server_without_memory_leaves_no_client_out(
    make_federation: MakeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")

    monkeypatch.setattr(accept, "why_malformed", refused)
    with pytest.raises(MachineError, match="Cannot allocate memory; free memory"):
        run(make_federation(), workers=1)


@dataclass(frozen=True, kw_only=True)
class EndsTheProcess(Defense):
    """A defense that calls sys.exit."""

    def on_batch(self, *_: object, **__: object) -> Any:
        sys.exit(0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_that_ends_the_process_ends_no_run_as_if_it_were_finished(
    make_federation: MakeFederation, workers: int
) -> None:
    with pytest.raises(LeaktightError, match="SystemExit: 0; a method must not end the process"):
        run(make_federation(defense=EndsTheProcess()), workers=workers)
