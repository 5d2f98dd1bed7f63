"""A plain Flower app, written as its user would, gains a defense by one line; what its server sees is attacked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.damage import flipped
from tests.engines.flower.grids import LocalGrid, nodes, take_identity
from tests.seeds import replayed
from torch import nn
from typer.testing import CliRunner

from leaktight.api.flower import defense_mod
from leaktight.cli.app import app as command_line
from leaktight.core.checksum import without_checksum
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Defense, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest, unpack
from leaktight.core.types import Batch, Update
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

NETWORK = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(12 * 4 * 4, 5),
    )
"""

PLAIN = """
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from net import build

app = ClientApp()


def picture(place):
    rows, columns = np.mgrid[0:16, 0:16]
    return (127 + 60 * np.sin(rows / (2 + place)) + 60 * np.cos(columns / 3)).astype(np.uint8)


@app.train()
def train(message, context):
    place = context.node_config["partition-id"]
    net = build()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    image = torch.tensor(picture(place), dtype=torch.float32)[None, None] / 255
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy(net(image), torch.tensor([3 - place]))
    loss.backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": 1, "loss": float(loss)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    net = build()
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    strategy = FedAvg(fraction_evaluate=0.0)
    asked = ConfigRecord({"lr": 0.1})
    arrays = ArrayRecord(net.state_dict())
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1, train_config=asked)
    context.state["arrays"] = result.arrays
"""


def load(folder: Path, text: str, name: str) -> ModuleType:
    (folder / "net.py").write_text(NETWORK)
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def served(module: ModuleType) -> dict[str, torch.Tensor]:
    """The model after the app has run with two nodes."""
    context = Context(1, 1, {}, RecordDict(), {})
    module.server(LocalGrid(module.app, nodes(2)), context)
    arrays: dict[str, torch.Tensor] = context.state.array_records["arrays"].to_torch_state_dict()
    return arrays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def inspected(folder: Path, captured: Path) -> Any:
    """What the command of a note makes of the first client's update, run as it is."""
    from PIL import Image

    note = json.loads((captured / "note.json").read_text())
    assert note["answered"]["metrics"]["num-examples"] == 1
    command = shlex.split(note["inspect"])
    assert command[:2] == ["leaktight", "inspect"]
    assert command[command.index("--batch-size") + 1] == "1"
    assert command[command.index("--local") + 1] == "learning_rate=0.1"
    truth = folder / "truth.png"
    rows, columns = np.mgrid[0:16, 0:16]
    Image.fromarray((127 + 60 * np.sin(rows / 2) + 60 * np.cos(columns / 3)).astype(np.uint8)).save(truth)
    quick = ["--attack", "csdlg", "--set", "attack.iterations=60", "--workers", "1"]
    out = ["--truth", str(truth), "--out", str(captured / "inspected"), "--json"]
    done = CliRunner().invoke(command_line, [*command[1:], *quick, *out], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_line_defends_a_plain_app_and_its_updates_are_attacked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("LEAKTIGHT_DATA", str(folder / "data"))
    recorded = '    grid = record_updates(grid, FOLDER, model="net:build", shape=(1, 16, 16))\n'
    watched = PLAIN.replace("    net = build()\n    generator", f"{recorded}    net = build()\n    generator")
    watched = watched.replace("\nimport torch\n", "\nimport torch\nfrom leaktight.api.flower import record_updates\n")
    defended = watched.replace("app = ClientApp()", "app = ClientApp(mods=[defense_mod(Outpost())])").replace(
        "\nimport torch\n",
        "\nimport torch\nfrom leaktight.api.flower import defense_mod\nfrom leaktight.defenses import Outpost\n",
    )
    changed = [line for line in defended.splitlines() if line not in watched.splitlines() and "import" not in line]
    assert len(changed) == 1
    models, scores = [], []
    for name, text in (("plain", watched), ("defended", defended)):
        captured = folder / name
        models.append(served(load(folder, text.replace("FOLDER", repr(str(captured))), name)))
        assert {each.name for each in (captured / "exchange-0001").iterdir()} == {"node-1000", "node-993"}
        node = captured / "exchange-0001" / "node-1000"
        assert (node / "after.npz").stat().st_mode & 0o777 == 0o600
        (cell,) = [cell for cell in inspected(folder, node)["cells"] if cell["role"] == "attack"]
        scores.append(cell["psnr"]["mean"])
    assert scores[0] > 30, "without the defense, the picture is found"
    assert scores[1] < 20, "with it, the same attack does not find it"
    assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])


def reply_to(app: ClientApp, net: nn.Module, context: Context | None = None) -> Message:
    take_identity()
    message = Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), 7, "train")
    return app(message, context or node())


def node(**settings: Any) -> Context:
    return Context(1, 7, {"partition-id": 0, **settings}, RecordDict(), {})


def arrays(message: Message) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = message.content.array_records["arrays"].to_torch_state_dict()
    return found


INPUTS, TARGETS = torch.rand(4, 6, generator=replayed(1).public()), torch.tensor([0, 1, 2, 0])


def network() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=replayed(2).public())
    return net


def make_app(mod: Any, *, steps: int = 2, before: Callable[[], None] = lambda: None, bare: bool = False) -> ClientApp:
    """A client that makes some steps; bare: without an optimiser."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before()
        net = network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(INPUTS), TARGETS).backward()
            if bare:
                with torch.no_grad():
                    for parameter in net.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(0.1 * parameter.grad)
            else:
                optimizer.step()
        metrics = MetricRecord({"num-examples": 4, "loss": 0.25})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


def by_hand(defense: Defense, steps: int, rng: Rng) -> dict[str, torch.Tensor]:
    """The same steps with the hooks called where they belong."""
    net = network()
    _, state = defense.start(net, None, rng=rng)  # type: ignore[arg-type]
    for index in range(steps):
        loss = nn.functional.cross_entropy(net(INPUTS), TARGETS)
        names = [name for name, _ in net.named_parameters()]
        gradient = dict(zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True))
        params = {name: parameter.detach() for name, parameter in net.named_parameters()}
        step = Step(index, 0, net, params, {}, Batch(INPUTS, TARGETS), gradient, 0.1, dict)
        stream = rng.child("step", index, "gradient")
        changed, state = defense.on_gradient(step, state, rng=stream, report=lambda name, value: None)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.sub_(0.1 * changed[name])
    return net.state_dict()


@pytest.mark.parametrize(
    "defense",
    [Outpost(decay=0.0), AdditiveNoise(noise_std=0.1), Stack(parts=(AdditiveNoise(noise_std=0.1), Outpost(decay=0.0)))],
    ids=lambda defense: type(defense).__name__,
)
def test_every_step_of_the_users_loop_is_defended(defense: Defense) -> None:
    rng = replayed(5)
    sent = arrays(reply_to(make_app(defense_mod(defense, rng=rng)), network()))
    here = rng.child("owner", "0", "round", 0, digest(network().state_dict()))
    expected = by_hand(defense, 2, here)
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor)
    plain = arrays(reply_to(make_app(defense_mod(Defense())), network()))
    assert any(not torch.allclose(plain[name], tensor) for name, tensor in expected.items())


def test_no_defense_changes_no_bit() -> None:
    plain = arrays(reply_to(make_app(lambda message, context, call_next: call_next(message, context)), network()))
    for name, tensor in arrays(reply_to(make_app(defense_mod(Defense())), network())).items():
        assert torch.equal(plain[name], tensor)


def test_moments_are_private_and_outlive_the_node(tmp_path: Path) -> None:
    defense = AdaDefense()
    app = make_app(defense_mod(defense, server_side=True), steps=1)
    changes: list[dict[str, torch.Tensor]] = []
    for _ in range(3):  # each time with the context of a node that has just started
        net = network()
        context = node(**{"state-dir": str(tmp_path)})
        after = arrays(reply_to(app, net, context))
        changes.append({name: after[name] - tensor for name, tensor in net.state_dict().items()})
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    plain, (_, state) = by_hand(Defense(), 1, replayed(0)), defense.start(network(), None, rng=replayed(0))  # type: ignore[arg-type]
    update = Update({name: plain[name] - tensor for name, tensor in network().state_dict().items()}, "delta")
    for change in changes:
        expected, state = defense.on_update(update, state, rng=replayed(0), report=lambda name, value: None)
        for name, tensor in expected.tensors.items():
            torch.testing.assert_close(change[name], tensor, rtol=1e-4, atol=1e-5)
    other = make_app(defense_mod(AdaDefense(beta1=0.5), server_side=True), steps=1)
    assert reply_to(other, network(), node(**{"state-dir": str(tmp_path)})).has_error(), "a state of another defense"


def test_a_flipped_bit_of_the_state_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(defense_mod(Outpost()), steps=1)
    assert reply_to(app, network(), node(**{"state-dir": str(tmp_path)})).has_content()
    (path,) = tmp_path.glob("*.state")
    for place in flipped(path, 8):
        assert reply_to(app, network(), node(**{"state-dir": str(tmp_path)})).has_error(), place
        assert "is damaged" in caplog.text, place
        caplog.clear()
    assert reply_to(app, network(), node(**{"state-dir": str(tmp_path)})).has_content()


def test_without_a_folder_the_state_lives_in_the_context() -> None:
    app, context = make_app(defense_mod(Outpost()), steps=1), node()
    for _ in range(2):
        reply_to(app, network(), context)
    held = context.state.config_records["leaktight.defense"]["state"]
    assert isinstance(held, bytes)
    state = unpack(without_checksum(held, "", remedy=""))
    assert (state["round"], state["defense"]["steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (FedKl(), "changes the shared network"),
        (Precode(), "changes the shared network"),
        (Lrp(), "asks clients"),
        (AdaDefense(), "has a part on the server"),
        (Stack(parts=(AdditiveNoise(), AdaDefense())), "has a part on the server"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_defense_that_a_mod_could_do_by_halves_is_refused(defense: Defense, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        defense_mod(defense)


SECRET = "patient 4711"


def explode() -> None:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize(
    "app",
    [
        make_app(defense_mod(Outpost()), before=explode),
        make_app(defense_mod(Outpost()), bare=True),
        make_app(defense_mod(DpSgd(noise_multiplier=0.0))),
        make_app(defense_mod(Soteria())),
    ],
    ids=["raises", "no optimiser", "per example", "network"],
)
def test_nothing_goes_out_that_could_not_be_defended(app: ClientApp) -> None:
    reply = reply_to(app, network())
    assert reply.has_error()
    assert reply.error.reason == "the client could not answer; its own log says why"


def test_an_error_in_a_step_is_not_swallowed_by_the_loop() -> None:
    app = ClientApp(mods=[defense_mod(DpSgd(noise_multiplier=0.0))])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        nn.functional.cross_entropy(net(INPUTS), TARGETS).backward()
        with contextlib.suppress(Exception):
            optimizer.step()
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), reply_to=message)

    assert reply_to(app, network()).has_error()


def test_a_defense_of_the_update_needs_no_optimiser_and_other_messages_pass() -> None:
    app = make_app(defense_mod(AdditiveNoise(noise_std=0.1, at="update"), rng=replayed(4)), bare=True)
    noisy, plain = arrays(reply_to(app, network())), by_hand(Defense(), 2, replayed(0))
    noise = torch.cat([(noisy[name] - plain[name]).flatten() for name in plain])
    assert 0.05 < float(noise.std()) < 0.2
    message = Message(RecordDict({"arrays": ArrayRecord(network().state_dict())}), 7, "evaluate")
    assert app(message, node()).content == message.content


def test_client_level_dp_keeps_metrics_back() -> None:
    pytest.importorskip("opacus")
    reply = reply_to(make_app(defense_mod(ClientDp(noise_multiplier=1.0, clip_norm=0.1))), network())
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 4}
    change = torch.cat([(arrays(reply)[name] - tensor).flatten() for name, tensor in network().state_dict().items()])
    assert 0.05 < float(change.std()) < 0.2


def test_beside_client_level_dp_other_functions_do_not_answer() -> None:
    """What they would say, a loss on the client's own data, no epsilon counts."""
    pytest.importorskip("opacus")
    message = Message(RecordDict({"arrays": ArrayRecord(network().state_dict())}), 7, "evaluate")
    assert make_app(defense_mod(ClientDp()))(message, node()).has_error()
    assert make_app(defense_mod(ClientDp(), scores=True))(message, node()).content == message.content
    assert make_app(defense_mod(ClientDp(noise_multiplier=0.0)))(message, node()).content == message.content


def test_a_stream_that_is_given_serves_every_round_and_node_with_noise_of_its_own(tmp_path: Path) -> None:
    """With one rng for all, two rounds, or two nodes, must not meet the same noise."""
    app = make_app(
        defense_mod(AdditiveNoise(noise_std=5.0, at="update"), rng=replayed(4), state_dir=tmp_path), bare=True
    )
    plain = by_hand(Defense(), 2, replayed(0))
    noises = []
    for place in (0, 0, 1):
        sent = arrays(reply_to(app, network(), node(**{"partition-id": place})))
        noises.append(torch.cat([(sent[name] - plain[name]).flatten() for name in plain]))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([noises[one], noises[other]]))[0, 1])) < 0.5


def test_exact_counters_do_not_leave_beside_client_level_dp() -> None:
    pytest.importorskip("opacus")

    def counted(message: Message, context: Context) -> Message:
        net = network()
        nn.functional.cross_entropy(net(INPUTS), TARGETS).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        tensors = {**net.state_dict(), "counts": torch.tensor([7, 3, 6])}
        return Message(RecordDict({"arrays": ArrayRecord(tensors)}), reply_to=message)

    before = {**network().state_dict(), "counts": torch.tensor([0, 0, 0])}
    message = Message(RecordDict({"arrays": ArrayRecord(before)}), 7, "train")
    reply = defense_mod(ClientDp())(message, node(), counted)
    assert arrays(reply)["counts"].tolist() == [0, 0, 0]


def test_hooks_are_removed_afterwards() -> None:
    reply_to(make_app(defense_mod(Outpost())), network())
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    torch.optim.SGD([parameter], lr=1.0).step()
    assert parameter.tolist() == [0.0, -1.0, -2.0]
