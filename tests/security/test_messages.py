"""Every message of a round, read as a server reads it: it holds what is on the list, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts.test_defenses import CASES
from tests.engines.flower.grids import nodes
from tests.engines.flower.test_play import grid_for
from tests.fl.talks import SMALL
from tests.seeds import replayed
from torch import nn

from leaktight.config.catalogue import AGGREGATORS, DEFENSES
from leaktight.core.protocols import Aggregator, Asked, Defense
from leaktight.core.rng import global_seed
from leaktight.core.tensors import unpack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples, Update
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.engines import inprocess
from leaktight.engines.flower.messages import HELLO, read_reply, read_request
from leaktight.engines.flower.server import play
from leaktight.fl.aggregators import FedAvg, FedSgd, ServerAdam, ServerMomentum
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting, FixedFusion
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.messages import LEAVES, Answered, Ask, Declined, Evaluated, Reply, Request, Trained, encode
from leaktight.fl.plan import FederationPlan
from leaktight.fl.robust import Krum, Median, NormBound, TrimmedMean

from flwr.app import Message  # isort: skip

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"

WAYS: Mapping[str, Aggregator] = {
    "fedavg": FedAvg(),
    "fedavg, scheme I": FedAvg(scheme="I"),
    "fedsgd": FedSgd(),
    "server_momentum": ServerMomentum(),
    "server_adam": ServerAdam(),
    "median": Median(),
    "trimmed_mean": TrimmedMean(),
    "krum": Krum(),
    "norm_bound": NormBound(),
    "fedboosting": FedBoosting(),
    "fedboosting, fixed": FedBoosting(variant="code", fusion=FixedFusion()),
    "encrypted": Encrypted(cipher=SMALL),
    "encrypted, fedboosting": Encrypted(of=FedBoosting(), cipher=SMALL),
}


@dataclass(frozen=True)
class Sent:
    """One answer of a client, with what was asked."""

    client: str
    request: Request
    reply: Reply


def scene(
    defense: Defense, aggregator: Aggregator, *, normalised: bool = False, evaluate: str = "server"
) -> Federation:
    generator = replayed(0).public()
    images = torch.randint(256, (60, 3, 4, 4), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.arange(60) % 3)
    data = Dataset("made up", examples, examples.part(0, 9), ("a", "b", "c"))
    with global_seed(replayed(1)):
        norm = [nn.BatchNorm2d(4)] if normalised else []
        model = nn.Sequential(nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    one_step = aggregator.update_kind == "gradient"
    clients = 3 if aggregator.why_too_few(3) is None else 5
    return assemble(
        data,
        Iid(clients=clients, validation=0.2).split(data, rng=replayed(2)),
        model,
        local=LocalTraining(samples=6, batch_size=6 if one_step else 3, learning_rate=0.05),
        aggregator=aggregator,
        plan=FederationPlan(rounds=2, evaluate=evaluate),  # type: ignore[arg-type]
        defense=defense,
        rng=replayed(3),
    )


def sent_inprocess(federation: Federation) -> list[Sent]:
    taken: list[Sent] = []
    exchange = inprocess.Carrier.exchange

    def tapped(self: inprocess.Carrier, requests: Mapping[str, Request]) -> Any:
        replies = exchange(self, requests)
        taken.extend(Sent(client, requests[client], reply) for client, reply in replies.items())  # type: ignore[arg-type]
        return replies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess.Carrier, "exchange", tapped)
        inprocess.run(federation, workers=1)
    return taken


def sent_on_flower(federation: Federation) -> list[Sent]:
    taken: list[Sent] = []
    names, places = sorted(federation.shares), {node: place for place, node in enumerate(nodes(len(federation.shares)))}

    def tapped(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type != HELLO:
            records = reply.content
            assert [*records.array_records] == ["leaktight.reply"], (
                "one record, and nothing beside it but its signature"
            )
            assert not records.metric_records
            assert {name: [*record] for name, record in records.config_records.items()} == {
                "leaktight.proof": ["signature"]
            }
            client = names[places[asked.metadata.dst_node_id]]
            taken.append(Sent(client, read_request(asked).request, read_reply(reply)))  # type: ignore[arg-type]
        return reply

    play(grid_for(federation, change=tapped), federation, run="tapped")
    return taken


def listed(reply: Reply, request: Request, federation: Federation) -> None:
    """Raise unless everything in a message is on the list, and nothing is there without need."""
    aggregator, defense = federation.setup.aggregator, federation.setup.defense
    (plain,) = unpack(encode({"reply": reply}))["message"].values()
    assert plain.pop("__type__") in {kind.__name__ for kind in LEAVES}
    assert set(plain) == set(LEAVES[type(reply)])
    if isinstance(reply, Trained):
        update = reply.update
        assert set(plain["update"]) - {"__type__"} == set(LEAVES[Update])
        assert update.tensors.keys() <= parameters(federation)
        assert (update.num_examples is None) or "num_examples" in aggregator.needs
        assert set(update.metrics) == aggregator.needs - {"num_examples"}
        assert (update.sealed is not None) == aggregator.sealed
        assert not (aggregator.sealed and update.tensors)
        assert (update.buffers or {}).keys() <= dict(federation.trainer.model.named_buffers()).keys()
    elif isinstance(reply, Evaluated):
        assert federation.server.scores_on is not None
    elif isinstance(reply, Answered):
        assert isinstance(request, Ask)
        questions = aggregator.questions if request.to == "aggregator" else defense.questions
        assert set(reply.payload) == set(questions[request.question.kind.partition("/")[0]].answer)
    else:
        assert reply == Declined()


def parameters(federation: Federation) -> set[str]:
    return set(dict(federation.trainer.model.named_parameters()))


def both(federation: Federation) -> Iterator[list[Sent]]:
    yield sent_inprocess(federation)
    yield sent_on_flower(federation)


def order(messages: list[Sent]) -> list[tuple[str, str, bytes]]:
    return sorted((each.client, type(each.request).__name__, encode({"reply": each.reply})) for each in messages)


@pytest.mark.parametrize("kind", CASES)
def test_messages_of_every_defense_are_those_of_the_list(kind: str) -> None:
    pytest.importorskip("opacus")
    federation = scene(CASES[kind].defense, FedAvg(scheme="I"))
    here, there = both(federation)
    for each in here + there:
        listed(each.reply, each.request, federation)
    assert order(here) == order(there), "the same bytes on Flower"
    assert sum(isinstance(each.reply, Trained) for each in here) == 6


@pytest.mark.parametrize("way", WAYS)
def test_messages_of_every_aggregator_are_those_of_the_list(way: str) -> None:
    federation = scene(Defense(), WAYS[way], normalised=True)
    here, there = both(federation)
    for each in here + there:
        listed(each.reply, each.request, federation)
    assert order(here) == order(there), "the same bytes on Flower"


@pytest.mark.parametrize("evaluate", ["server", "clients"])
def test_clients_score_models_only_where_that_was_agreed_on(evaluate: str) -> None:
    for messages in both(scene(Defense(), FedAvg(), evaluate=evaluate)):
        assert any(isinstance(each.reply, Evaluated) for each in messages) == (evaluate == "clients")


def test_every_aggregator_of_the_catalogue_is_tried() -> None:
    assert {type(each) for each in WAYS.values()} == set(AGGREGATORS.values())


def test_a_message_has_no_field_that_is_not_listed() -> None:
    for message, leaves in LEAVES.items():
        assert {field.name for field in fields(message)} == set(leaves)


def page() -> str:
    """The tables of docs/messages.md, from what the code says."""
    rows = ["| message | field | sent | what for |", "|---|---|---|---|"]
    for message, leaves in LEAVES.items():
        rows += [f"| `{message.__name__}` | `{name}` | {each.when} | {each.why} |" for name, each in leaves.items()]
        rows += (
            [] if leaves else [f"| `{message.__name__}` | | nothing but itself | {(message.__doc__ or '').strip()} |"]
        )
    rows += ["", "| aggregator | needs beside the update |", "|---|---|"]
    for kind, of in AGGREGATORS.items():
        needs = ", ".join(f"`{need}`" for need in sorted(of().needs)) or "nothing"
        rows.append(f"| `{kind}` | {needs} |")
    rows += ["", "| asked by | question | how often | answer | what for |", "|---|---|---|---|---|"]
    for kind, asked in _questions():
        for name, each in asked.items():
            often = "once a round" if each.each_round else "once a run"
            answer = ", ".join(f"`{field}`" for field in each.answer) or "nothing"
            exact = "; **exact figures of the data**" if each.exact else ""
            rows.append(f"| `{kind}` | `{name}` | {often} | {answer} | {each.why}{exact} |")
    return "\n".join(rows)


def _questions() -> Iterator[tuple[str, Mapping[str, Asked]]]:
    for kind, aggregator in AGGREGATORS.items():
        yield kind, aggregator().questions
    for kind, case in CASES.items():
        if kind != "stack":
            yield kind, case.defense.questions


def test_the_page_is_the_list() -> None:
    assert page() in PAGE.read_text(), f"docs/messages.md should have:\n{page()}"
    assert set(DEFENSES) - {"none"} == set(CASES)


def test_figures_that_nobody_needs_stay_at_the_client() -> None:
    """The number of examples, losses and steps were sent by everybody once."""
    (trained, *_), _ = (sent_inprocess(scene(each, FedAvg(scheme="I"))) for each in (Defense(), CASES["lrp"].defense))
    assert isinstance(trained.reply, Trained)
    assert trained.reply == Trained(replace(trained.reply.update, num_examples=None, metrics={}))
