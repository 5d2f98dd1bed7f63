"""Where work runs: the choice of a device, moves, random layers, memory; the pretended device finds defects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.audits.scenes import SMALL
from tests.contracts.test_attacks import digits, network, smooth
from tests.devices.pretend import CPU, CUDA, WrongDeviceError, pretending
from tests.here import Here
from tests.seeds import replayed
from torch import Tensor, nn
from torch.nn import functional as F

import leaktight as lt
from leaktight.attacks.matching.spread import Workload, bytes_of, choose, groups_of
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.audits.watching import reconstructed
from leaktight.config.catalogue import MODELS
from leaktight.core import devices
from leaktight.core.devices import chosen_device, device_of, for_float64, free_memory, moved, working_on
from leaktight.core.errors import UsageError
from leaktight.core.inputs import Images
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng, global_seed, secret_model
from leaktight.core.tasks import WordRecognition
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Examples, State, Update
from leaktight.fl.local import Trainer, evaluate, loss_and_gradient
from leaktight.models.crnn import Crnn
from leaktight.models.initialise import build_model
from leaktight.runtime import memory
from leaktight.runtime.memory import fitting, processes_on
from leaktight.runtime.processes import available_cores


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 2 if kind == "cuda" else 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: None if device.type == "cpu" else 1 << 33)


# ------------------------------------------------------------------------------------------------- choosing a device


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_absent_is_an_error_that_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 0)
    kind = name.partition(":")[0]
    with pytest.raises(UsageError, match=f"got '{name}': {kind} is not available here; use --device cpu"):
        chosen_device(name)
    assert chosen_device("auto") == CPU


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:one", "cuda:-1", "cpu:0", "", "CUDA"])
def test_another_name_is_an_error_that_lists_them(name: str, two_gpus: None) -> None:
    with pytest.raises(UsageError, match="expected as device auto, cpu, cuda, cuda:1 and so on, or mps"):
        chosen_device(name)


def test_a_device_has_its_number(two_gpus: None) -> None:
    assert [str(chosen_device(name)) for name in ("auto", "cpu", "cuda", "cuda:1")] == [
        "cuda:0",
        "cpu",
        "cuda:0",
        "cuda:1",
    ]
    with pytest.raises(UsageError, match="got 'cuda:2': cuda has the numbers 0 to 1; use --device cuda"):
        chosen_device("cuda:2")


@pytest.mark.parametrize("command", ["audit", "tradeoff", "train"])
def test_the_command_line_says_so_before_any_work(command: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 0)
    code, _, errors = here(command, "--device", "cuda", "--dry-run")
    assert code == 2
    assert "cuda is not available here; use --device cpu" in errors
    assert here(command, "--device", "auto", "--dry-run")[0] == 0


def test_a_config_and_python_name_it_too(two_gpus: None, tmp_path: Path) -> None:
    from leaktight.api.audit import plan

    path = tmp_path / "small.toml"
    path.write_text('device = "cuda:1"\n' + SMALL)
    planned = plan("audit", path)
    assert planned.experiment.federation.setup.device == torch.device("cuda", 1)
    assert planned.facts["device"] == "cuda:1"
    assert 'device = "cuda:1"' in planned.config.to_toml()
    said = plan("audit", path, device="auto")
    assert said.experiment.federation.setup.device == CUDA
    assert 'device = "cuda:0"' in said.config.to_toml(), "a run is resumed where it began"
    with pytest.raises(UsageError, match="device"):
        lt.train(path, device="gpu")


# ------------------------------------------------------------------------------------------------- a whole run


def trials(run: Path) -> list[Mapping[str, Any]]:
    lines = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    kept = ("id", "status", "scores", "loss", "first_loss", "rank", "examples", "update_changed")
    return sorted(({key: line.get(key) for key in kept} for line in lines), key=lambda line: str(line["id"]))


def test_an_audit_on_a_device_finds_what_the_cpu_finds(two_gpus: None, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('secret_seed = "' + "ab" * 32 + '"\n' + SMALL.replace("trials = 2", "trials = 1"))
    settings = ["audit.metrics=['psnr','mse_r']", "audit.attack_round=1", "attack.csdlg.onednn=false"]
    lt.audit(path, out=tmp_path / "cpu", settings=settings)
    with pretending() as labels:
        lt.audit(path, out=tmp_path / "cuda", settings=settings, device="cuda")
    assert "cuda:0" in labels.used()
    found = trials(tmp_path / "cuda")
    assert found == trials(tmp_path / "cpu")
    assert {line["status"] for line in found} == {"done"}


def test_an_inspection_on_a_device(two_gpus: None, tmp_path: Path) -> None:
    batch = draw(digits(), 1, seed=3)
    seen = observe(network(activation="sigmoid"), batch, 10)
    summaries = []
    for device in ("cpu", "cuda"):
        with pretending() as labels:
            summary = lt.inspect(
                seen.model,
                dict(seen.broadcast.params),
                update=dict(seen.update.tensors),
                kind="gradient",
                shape=(1, 8, 8),
                attacks=[InvertingGradients(iterations=2, backend="eager", onednn=False)],
                truth=batch.inputs,
                out=tmp_path / device,
                device=device,
            )
        summaries.append(summary)
        assert ("cuda:0" in labels.used()) == (device == "cuda")
    assert trials(tmp_path / "cpu") == trials(tmp_path / "cuda")
    assert summaries[1].scenario["device"] == "cuda:0"
    assert "device" not in summaries[0].scenario


# ------------------------------------------------------------------------------------------------- moves


def test_a_value_is_moved_once_with_all_that_it_holds_and_stays_as_it_was() -> None:
    (seen,) = smooth()
    with pretending():
        there = moved({"seen": (seen, [seen])}, CUDA)["seen"]
        assert there[0] is there[1][0]
        one = there[0]
        held = [*one.model.parameters(), *one.broadcast.params.values(), *one.update.tensors.values()]
        assert one.labels is not None
        assert one.public_data is not None
        assert {each.device for each in (*held, one.labels, one.public_data.inputs)} == {CUDA}
        assert device_of(seen.broadcast.params) == device_of(dict(seen.model.named_parameters())) == CPU
        assert type(one) is type(seen)
        assert (one.task, one.inputs, one.batch_size) == (seen.task, seen.inputs, seen.batch_size)
        back = moved(one, CPU)
        assert all(torch.equal(back.update.tensors[name], each) for name, each in seen.update.tensors.items())
    assert moved(seen, CPU) is seen, "nothing is copied where nothing moves"


class Drawing(nn.Module):
    """Layers that draw random numbers in every way a network may."""

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.randn_like(inputs) + torch.rand(inputs.shape, device=inputs.device)
        mask = torch.empty_like(inputs).bernoulli_(0.5)
        return F.dropout(inputs, 0.3) + 0.1 * noise * mask + F.dropout2d(inputs, 0.5) + torch.bernoulli(inputs)


def test_a_network_draws_the_same_numbers_on_every_device() -> None:
    inputs = torch.rand(2, 3, 4, 4, generator=replayed(0).public())
    for draws in (global_seed, secret_model):
        with draws(replayed(5)):
            expected = Drawing()(inputs)
        with pretending():
            with draws(replayed(5)), working_on(CUDA):
                found = Drawing()(moved(inputs, CUDA))
            assert found.device == CUDA
        assert torch.equal(found, expected)
    with pretending(), pytest.raises(WrongDeviceError, match="draws random numbers on cuda:0"):
        Drawing()(moved(inputs, CUDA))


def test_per_example_draws_under_vmap() -> None:
    inputs = torch.rand(3, 5, generator=replayed(0).public())
    mapped = torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness="different")
    with global_seed(replayed(5)):
        expected = mapped(inputs)
    with pretending(), global_seed(replayed(5)), working_on(CUDA):
        assert torch.equal(mapped(moved(inputs, CUDA)).cpu(), expected)


def test_float64_is_computed_where_it_exists() -> None:
    with pretending():
        assert for_float64(moved(torch.ones(1), torch.device("mps:0"))).double().device == CPU
        assert for_float64(moved(torch.ones(1), CUDA)).double().device == CUDA
        with pytest.raises(WrongDeviceError, match="float64 does not exist on mps:0"):
            moved(torch.ones(1), torch.device("mps:0")).double()


@pytest.mark.parametrize("twice", [False, True])
def test_words_are_recognised_on_a_device(twice: bool) -> None:
    model = build_model(Crnn(units=8, width=4), Images(3, 32, 40), 36, rng=replayed(0)).eval()
    words = torch.tensor([[3, 7, -1], [5, -1, -1]])
    given = Trainer(model, LocalTraining(), WordRecognition(), mode="eval"), parameters_of(model), buffers_of(model)
    batch = Batch(torch.rand(2, 3, 32, 40, generator=replayed(0).public()), words)
    expected = loss_and_gradient(*given, batch, create_graph=twice)
    with pretending():
        loss, gradient = loss_and_gradient(*moved((*given, batch), CUDA), create_graph=twice)
        assert {loss.device, *(each.device for each in gradient.values())} == {CUDA}
        assert evaluate(*given, Examples((batch.inputs * 255).byte(), words), device=CUDA).num_examples == 2
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(each, expected[1][name]) for name, each in gradient.items())


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("free", "each", "expected"), [(1000, 100, 8), (1000, 300, 2), (1000, 5000, 1), (10**6, 1, 12)]
)
def test_work_fits_into_free_memory(free: int, each: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert free_memory(CUDA) == free
    assert fitting(CUDA, each, 12) == expected
    assert fitting(CPU, each, 12) == 12


def test_processes_are_as_many_as_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 8 << 30))
    few, many = processes_on(CUDA, 4 << 30), processes_on(CUDA, 1 << 20)
    assert few == 1
    assert many is not None
    assert 8 <= many < 16
    assert processes_on(CPU, 4 << 30) is None


def test_a_run_starts_so_many(two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leaktight.api.runs import parse_workers
    from leaktight.api.train import plan

    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    federation = plan(path, device="cuda").federation
    for free, expected in ((1 << 20, 1), (1 << 40, available_cores())):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        with pretending():
            assert federation.most_processes == expected
    assert plan(path).federation.most_processes is None
    executor, training = parse_workers(None, 3)
    assert getattr(executor, "number", None) == training == 3


def test_lanes_are_as_many_as_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = InvertingGradients(restarts=6, iterations=2, backend="eager", onednn=False)
    load = replace(attack.matching().workload, separable=True)
    with pretending():
        evidence = attack.matching().evidence(moved(smooth(), CUDA), rng=replayed(1))
        assert choose(load, evidence, "auto", 8) == ("vmap", 1), "one process, whatever the cores"
        own = bytes_of(evidence)
        assert own > sum(tensor.nbytes for _, view, _ in evidence.views for tensor in view.params.values())
        for lanes, expected in ((4, [4, 2]), (6, [6]), (0, [1] * 6)):
            free = int((lanes + 0.5) * own / 0.8)
            monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
            groups = groups_of(load, evidence, "vmap")
            assert [len(group) for group in groups] == expected
            assert [number for group in groups for number in group] == list(range(6))
        assert groups_of(Workload(6, 2, True, False), evidence, "vmap") == [list(range(6))]


def test_guesses_do_not_depend_on_how_many_lanes_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    attack = InvertingGradients(restarts=3, iterations=2, backend="eager", onednn=False)
    found = []
    for free in (1, 1 << 40):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        with pretending():
            found.append(reconstructed(attack, [smooth()], rng=replayed(1), device=CUDA))
    torch.testing.assert_close(found[0].guess.inputs, found[1].guess.inputs)
    assert found[0].notes["losses"] == pytest.approx(found[1].notes["losses"], rel=1e-4)


# ------------------------------------------------------------------------------------------------- the pretended device


EARLIER = torch.ones(3)
CARELESS: Mapping[str, Callable[[Tensor], object]] = {
    "a factory without a device": lambda there: there + torch.zeros(3),
    "a matrix on the CPU": lambda there: there @ torch.eye(3),
    "a list made into a tensor": lambda there: torch.cat([there, torch.tensor([1.0])]),
    "a tensor from before": lambda there: there * EARLIER,
    "a stack": lambda there: torch.stack([there.sum(), torch.zeros(())]),
    "an index of another device": lambda there: torch.arange(3)[there > 0],
    "NumPy": lambda there: there.numpy(),
    "a draw": lambda there: torch.rand_like(there),
    "a draw in place": lambda there: torch.empty_like(there).normal_(),
    "a generator of the CPU": lambda there: torch.rand(3, device=there.device, generator=replayed(0).public()),
    "a derivative": lambda there: torch.func.grad(lambda x: (x * torch.ones(3)).sum())(there),
}
FINE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda there: 2 * there + torch.tensor(1.0),
    "what follows the device": lambda there: there + torch.zeros(3, device=there.device) + torch.ones_like(there),
    "an index on the CPU": lambda there: there[torch.tensor([2, 0])],
    "a derivative": lambda there: torch.func.grad(lambda x: (x.square() * x.new_ones(3)).sum())(there),
    "what PyTorch makes inside": lambda there: F.one_hot((there > 0.5).long(), 2).float() @ there.new_ones(2),
    "a draw that is moved": lambda there: there + torch.rand(3, generator=replayed(0).public()).to(there),
}


@pytest.mark.parametrize("kind", CARELESS)
def test_it_finds_carelessness(kind: str) -> None:
    with pretending(), pytest.raises(WrongDeviceError):
        CARELESS[kind](moved(torch.rand(3, generator=replayed(0).public()), CUDA))


@pytest.mark.parametrize("kind", FINE)
def test_it_allows_what_is_allowed(kind: str) -> None:
    values = torch.rand(3, generator=replayed(0).public())
    with pretending():
        result = FINE[kind](moved(values, CUDA))
        assert result.device == CUDA
    assert torch.equal(result, FINE[kind](values)), "values are those of the CPU"


@dataclass(frozen=True, kw_only=True)
class Careless(Defense):
    """Adds a vector that it makes where it pleases."""

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        sent = {name: tensor + torch.full(tensor.shape, 0.1) for name, tensor in update.tensors.items()}
        return replace(update, tensors=sent), state


def test_a_careless_defense_is_found_in_its_round(two_gpus: None, tmp_path: Path) -> None:
    settings = {"data": {"kind": "digits", "size": 8}, "defenses": [Careless()], "settings": ["federation.rounds=1"]}
    with pretending(), pytest.raises(WrongDeviceError, match="mixes devices"):
        lt.train(out=tmp_path / "run", device="cuda", workers=1, **settings)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- fake tensors


def test_traced_graphs_and_all_networks_stay_on_one_device() -> None:
    """With PyTorch's own fake tensors, on a registered device; in a process of its own, as that cannot be undone."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fake.py"))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {"first order", "vmap", "lbfgs", *MODELS} - {"crnn"}
    assert all(each == ["pretend:0"] for each in found.values()), found
