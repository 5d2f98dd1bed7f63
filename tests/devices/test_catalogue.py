"""Every entry of the catalogue runs on an accelerator, with the same numbers as on the CPU.

Without an accelerator: `pretend.py` raises where one would, and computes what the CPU computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adaptive import scenes
from tests.contracts.test_attacks import CASES, answered, assert_same, case
from tests.devices.pretend import CPU, CUDA, MPS, pretending
from tests.golden import attack_runs, federation_runs
from tests.golden.attack_runs import ADAPTIVE, LABELS
from tests.golden.doors import federation_of, made
from tests.golden.federation_runs import AGGREGATORS, DEFENDED
from tests.golden.stable import stable
from tests.golden.test_digests import digests_of, recorded, same_machine
from tests.seeds import replayed
from torch import Tensor

from leaktight.audits.watching import reconstructed
from leaktight.config.catalogue import AGGREGATORS as RULES
from leaktight.config.catalogue import ATTACKS, DEFENSES
from leaktight.config.catalogue import LABELS as STRATEGIES
from leaktight.core import devices
from leaktight.core.devices import moved, working_on
from leaktight.fl.plan import Setup
from leaktight.metrics import METRICS, Resources
from leaktight.runtime import memory

QUICK = {"noise", "client_dp", "dp_sgd", "precode", "outpost-first_order", "lrp-first_order"}
"""Adaptive attackers with short searches; the others run with the slow tests."""

TRAINED = [*RULES, "fedavg-resnet20"]

accelerators = pytest.mark.parametrize("device", [CUDA, MPS], ids=["cuda", "mps"])


@pytest.fixture(autouse=True)
def _accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda kind: 2)
    monkeypatch.setattr(memory, "free_memory", lambda device: None if device.type == "cpu" else 1 << 33)


@contextmanager
def used(device: torch.device) -> Iterator[None]:
    """Pretend, and see that something was computed there."""
    with pretending() as labels:
        yield
    assert str(device) in labels.used()


def on_the_cpu(name: str) -> dict[str, str]:
    """The digests of a canonical run on the CPU, which are recorded."""
    found: dict[str, str] = recorded()["runs"][name] if same_machine() else digests_of(name)
    return found


def digests(parts: Mapping[str, Any]) -> dict[str, str]:
    return {name: stable(value) for name, value in parts.items()}


def test_every_entry_is_here() -> None:
    assert set(CASES) == set(ATTACKS)
    assert set(LABELS) >= set(STRATEGIES)
    assert set(DEFENDED) >= set(DEFENSES)
    assert set(AGGREGATORS) >= set(RULES)


@pytest.mark.parametrize("kind", CASES)
def test_an_attack(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, also the members of `auto`: tracing on a device that PyTorch is not built for ends the process."""
    monkeypatch.setattr("leaktight.attacks.matching.attack.choose_backend", lambda *_, **__: "eager")
    attack, seen = case(kind)
    expected = attack.reconstruct(list(seen), rng=replayed(1)) if kind == "auto" else answered(kind)
    with used(CUDA):
        found = reconstructed(attack, [seen], rng=replayed(1), device=CUDA)
        assert {found.guess.inputs.device, found.guess.targets.device} == {CPU}
    assert_same(found, expected)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in ADAPTIVE]
)
def test_an_attacker_who_knows_the_defense(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_the_cpu(f"adaptive/{kind}")

    def answer(attack: Any, *seen: Any) -> dict[str, Any]:
        with used(CUDA):
            found = reconstructed(attack, [list(seen)], rng=replayed(1), device=CUDA)
        loss = torch.tensor(found.loss, dtype=torch.float64)
        return {"images": found.guess.inputs, "labels": found.guess.targets, "loss": loss}

    monkeypatch.setattr(attack_runs, "answer", answer)
    assert digests(ADAPTIVE[kind]()) == expected


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_rule_for_labels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_the_cpu(f"labels/{kind}")

    class There:
        """The rule with what it is shown on the device."""

        def __init__(self, rule: Any) -> None:
            self.rule = rule

        def infer(self, seen: Any, number: int, *, rng: Any) -> Tensor:
            with working_on(CUDA):
                found: Tensor = self.rule.infer(moved(seen, CUDA), number, rng=rng)
                return moved(found, CPU)

    def rule_there(family: str, name: str, **settings: Any) -> Any:
        return There(made(family, name, **settings)) if family == "labels" else made(family, name, **settings)

    monkeypatch.setattr(attack_runs, "made", rule_there)
    with used(CUDA):
        assert digests(LABELS[kind]()) == expected


def there(run: Callable[[], Mapping[str, Any]], device: torch.device) -> dict[str, str]:
    """A run on the device; what it returns, messages included, is on the CPU."""
    with used(device):
        parts = run()
        assert all(each.device == CPU for each in torch.utils._pytree.tree_leaves(parts) if isinstance(each, Tensor))
    return digests(parts)


@accelerators
@pytest.mark.parametrize("kind", DEFENDED)
def test_a_defense(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_the_cpu(f"defense/{kind}")
    monkeypatch.setattr(scenes, "Setup", partial(Setup, device=device))
    assert there(DEFENDED[kind], device) == expected


@pytest.mark.parametrize(("kind", "device"), [*((kind, CUDA) for kind in TRAINED), ("fedavg", MPS)])
def test_an_aggregator_in_rounds_of_training(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = federation_runs.TRAINED[f"in_process/{kind}"]
    expected = on_the_cpu(f"train/in_process/{kind}")
    monkeypatch.setattr(federation_runs, "federation_of", lambda *asked: federation_of(*asked, f"device={device.type}"))
    assert there(run, device) == expected


@accelerators
@pytest.mark.parametrize("name", METRICS)
def test_a_metric(name: str, device: torch.device, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue("real_data") if name.startswith("lpips") else tmp_path
    metric = METRICS[name].build(Resources(root=root, extract=lambda images: images.flatten(1)))
    if METRICS[name].judges == "labels":
        pair = [torch.tensor([1, 2]), torch.tensor([2, 3])]
    else:
        pair = [torch.rand(2, 3, 32, 32, generator=replayed(place).public()) for place in range(2)]
    expected = metric(*pair)
    with used(device):
        assert metric(*moved(pair, device)).tolist() == expected.tolist()
