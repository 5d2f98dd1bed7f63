"""The guard in a user's own Flower app: a tampered model never reaches the user's function."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.engines.flower.test_mods import INPUTS, arrays, make_app, network, node, reply_to
from torch import nn

from leaktight.api.flower import guard_mod
from leaktight.core.checksum import without_checksum
from leaktight.core.errors import UsageError
from leaktight.core.tensors import unpack
from leaktight.guard import BroadcastGuard

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict  # isort: skip


def fishing(net: nn.Module, target: int = 1) -> nn.Module:
    """The network with the last layer of a fishing server."""
    head = net[-1]  # type: ignore[index]
    with torch.no_grad():
        head.weight.zero_()
        head.weight[target] = 0.5
        head.bias.fill_(1000.0)
        head.bias[target] = 0.0
    return net


def calls() -> tuple[list[int], object]:
    counted: list[int] = []
    return counted, lambda: counted.append(1)


def test_honest_models_pass_unchanged_and_are_remembered() -> None:
    counted, before = calls()
    context = node()
    app = make_app(guard_mod(BroadcastGuard(), network(), inputs=INPUTS), before=before)  # type: ignore[arg-type]
    plain = arrays(reply_to(make_app(lambda message, context, call_next: call_next(message, context)), network()))
    sent = arrays(reply_to(app, network(), context))
    assert all(torch.equal(plain[name], tensor) for name, tensor in sent.items())
    following = network()
    following.load_state_dict(sent)
    assert not reply_to(app, following, context).has_error()
    assert len(counted) == 2
    held = context.state.config_records["leaktight.guard"]["state"]
    assert isinstance(held, bytes)
    state = unpack(without_checksum(held, "", remedy=""))
    assert state["round"] == 1, "the second, as the server does not say"
    for name, tensor in following.state_dict().items():
        assert torch.equal(state["received"][name], tensor)
        change = arrays(reply_to(app, following, node()))[name] - tensor
        assert state["sizes"][name] >= float(change.norm()) * (1 - 1e-6), "the largest of its own updates so far"


def test_a_fishing_model_is_refused_without_a_reason_for_the_server(caplog: pytest.LogCaptureFixture) -> None:
    counted, before = calls()
    app = make_app(guard_mod(BroadcastGuard(), network()), before=before)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, logger="leaktight.flower"):
        reply = reply_to(app, fishing(network()))
    assert not counted, "the user's function was not called"
    assert reply.has_error()
    assert "last layer" not in str(reply.error.reason)
    assert "a bias of the last layer stands out" in caplog.text


def test_a_lazy_network_is_materialised_by_the_inputs() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))
    guard_mod(BroadcastGuard(), lazy, inputs=INPUTS)
    assert isinstance(lazy[1], nn.LazyLinear), "the caller's own stays as it is"
    with pytest.raises(UsageError, match="got lazy modules; run it once, or give inputs"):
        guard_mod(BroadcastGuard(), lazy)


def test_with_warn_the_function_is_called() -> None:
    counted, before = calls()
    app = make_app(guard_mod(BroadcastGuard(action="warn"), network()), before=before)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="suspicious model"):
        assert not reply_to(app, fishing(network())).has_error()
    assert counted


def test_another_architecture_and_arrays_without_names_are_refused() -> None:
    app = make_app(guard_mod(BroadcastGuard(), network()))
    wider = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    assert reply_to(app, wider).has_error()
    unnamed = Message(
        RecordDict({"arrays": ArrayRecord([tensor.numpy() for tensor in network().state_dict().values()])}), 7, "train"
    )
    assert app(unnamed, node()).has_error()


def test_a_jump_is_seen_after_a_restart_of_the_node_and_over_missed_rounds(tmp_path: Path) -> None:
    app = make_app(guard_mod(BroadcastGuard(bias=1e9), network()))

    def asked(net: nn.Module, number: int) -> Message:
        content = RecordDict({"arrays": ArrayRecord(net.state_dict())})
        content["config"] = ConfigRecord({"server-round": number})
        return app(Message(content, 7, "train"), node(**{"state-dir": str(tmp_path)}))

    first = asked(network(), 1)
    own = {name: tensor - network().state_dict()[name] for name, tensor in arrays(first).items()}
    far = network()
    far.load_state_dict({name: tensor + 40 * own[name] for name, tensor in network().state_dict().items()})
    assert asked(far, 2).has_error(), "forty times one's own change in one round"
    assert not asked(far, 6).has_error(), "in five rounds, eight times each is within the limit"
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_evaluation_is_not_guarded() -> None:
    app = make_app(guard_mod(BroadcastGuard(), network()))
    message = Message(RecordDict({"arrays": ArrayRecord(fishing(network()).state_dict())}), 7, "evaluate")
    assert not app(message, node()).has_error()


def numbered(app: object, number: object, context: object) -> Message:
    content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    content["config"] = ConfigRecord({"server-round": number})  # type: ignore[dict-item]
    return app(Message(content, 7, "train"), context)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("number", [10**9, 0, -3, 1.5, "7"])
def test_a_wrong_round_number_is_refused(number: object) -> None:
    app = make_app(guard_mod(BroadcastGuard(), network(), share=0.5))
    assert numbered(app, number, node()).has_error()
    context = node()
    assert not numbered(app, 3, context).has_error()
    assert numbered(app, 3, context).has_error(), "the same round again"
    assert numbered(app, number, context).has_error()


def test_the_share_of_clients_is_a_share() -> None:
    with pytest.raises(ValueError, match="expected share in"):
        guard_mod(BroadcastGuard(), network(), share=0.0)
