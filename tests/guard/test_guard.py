"""The client's guard: honest models pass, tampered ones do not, and it says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.tampered import scene
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.malicious.fishing import Fishing
from leaktight.attacks.malicious.robbing_the_fed import RobbingTheFed
from leaktight.config.catalogue import MODELS
from leaktight.config.settings import load_config
from leaktight.core.errors import ConfigError, RoundFailedError
from leaktight.core.protocols import Sight
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.types import Broadcast, Params, Update
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.engines.inprocess import Reports, run
from leaktight.guard import BroadcastGuard
from leaktight.guard.signs import likeness
from leaktight.models.imprint import with_imprint
from leaktight.models.initialise import build_model

KINDS = ["mlp", "lenet_zhu", "shallow_cnn", "resnet20"]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=16).load(Path())


def network(data: Dataset, kind: str) -> nn.Module:
    return build_model(MODELS[kind](), data.inputs, data.num_classes, rng=replayed(4))


def sight(data: Dataset, count: int = 32) -> Sight:
    return Sight(inputs=data.inputs, rng=replayed(3), examples=data.train.batch(slice(0, count)))


def sent(model: nn.Module, round_index: int = 0) -> Broadcast:
    return Broadcast(cloned(parameters_of(model)), cloned(buffers_of(model)), round_index)


def changed(broadcast: Broadcast, **tensors: Callable[[Tensor], Tensor]) -> Broadcast:
    """The broadcast with functions applied to the tensors whose names end so."""
    params: dict[str, Tensor] = dict(broadcast.params)
    for ending, function in tensors.items():
        for name in params:
            if name.endswith(ending.replace("__", ".")):
                params[name] = function(params[name].clone())
    return replace(broadcast, params=params)


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_federation_passes(digits: Dataset, kind: str) -> None:
    played = scene(digits, network(digits, kind), batch=16, clients=3, steps="delta", guard=BroadcastGuard())
    federation = replace(played.federation, plan=replace(played.federation.plan, rounds=3))
    rounds: list[Reports] = []
    run(federation, workers=1, score=False, on_reports=rounds.append)
    assert len(rounds) == 3
    assert all(report["guard_suspicious"] == 0 for reports in rounds for report in reports.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("attack", "code"),
    [(RobbingTheFed(num_bins=32), "architecture"), (Fishing(target=1, strategy="class"), "bias")],
    ids=["imprint", "fishing"],
)
def test_a_malicious_server_gets_nothing(
    digits: Dataset, kind: str, attack: RobbingTheFed | Fishing, code: str
) -> None:
    model = network(digits, kind)
    with pytest.raises(RoundFailedError, match="refused the model of round 2"):
        scene(digits, model, batch=16, guard=BroadcastGuard()).play(attack)
    _, seen = scene(digits, model, batch=16).play(attack)
    tampered = seen[1].broadcast
    judged = BroadcastGuard().judge(tampered, model, sight(digits), {})
    assert code in [finding.code for finding in judged.findings]
    assert not BroadcastGuard().judge(seen[0].broadcast, model, sight(digits), {}).suspicious


def test_a_warning_lets_the_round_go_on(digits: Dataset) -> None:
    watched = scene(digits, network(digits, "mlp"), batch=16, guard=BroadcastGuard(action="warn"))
    with pytest.warns(UserWarning, match="suspicious model in round 2: another architecture"):
        _, seen = watched.play(RobbingTheFed(num_bins=32))
    assert len(seen) == 2


def test_like_rows_are_noticed_where_the_module_was_agreed_on(digits: Dataset) -> None:
    """The server may have named the imprinted network as the architecture from the start."""
    model = network(digits, "lenet_zhu")
    _, seen = scene(digits, model, batch=16).play(RobbingTheFed(num_bins=32))
    agreed = with_imprint(model, digits.inputs, 32)
    judged = BroadcastGuard().judge(replace(seen[1].broadcast, model=None), agreed, None, {})
    assert [finding.code for finding in judged.findings] == ["alike", "mirrored"]
    assert "'imprint." in judged.because()
    assert not BroadcastGuard().judge(sent(agreed), agreed, None, {}).suspicious


def test_each_sign_has_its_reason(digits: Dataset) -> None:
    model = network(digits, "mlp")
    guard = BroadcastGuard()

    def codes(broadcast: Broadcast, **state: object) -> set[str]:
        return {finding.code for finding in guard.judge(broadcast, model, sight(digits), state).findings}

    def raised(tensor: Tensor) -> Tensor:
        tensor[1] = tensor[1] * 10 + 4
        return tensor

    honest = sent(model, 1)
    assert codes(honest) == set()
    assert "bias" in codes(changed(honest, classifier__4__bias=raised))
    assert "row" in codes(changed(honest, classifier__4__weight=raised))
    assert "alike" in codes(changed(honest, classifier__2__weight=lambda tensor: tensor[:1].expand_as(tensor)))
    assert "mirrored" in codes(changed(honest, classifier__2__weight=lambda tensor: torch.cat([tensor[:100]] * 2)))
    assert "quiet" in codes(changed(honest, classifier__0__bias=lambda tensor: tensor - 100))
    assert codes(replace(honest, round=-1)) == {"round"}
    assert codes(changed(honest, classifier__0__bias=lambda tensor: tensor * math.nan)) == {"not-finite"}
    shapes = replace(honest, params={**honest.params, "classifier.0.bias": torch.zeros(3)})
    assert codes(shapes) == {"architecture"}
    missing = {name: tensor for name, tensor in honest.params.items() if name != "classifier.0.bias"}
    assert codes(replace(honest, params=missing)) == {"architecture"}


def test_a_jump_is_measured_by_ones_own_updates_and_rounds(digits: Dataset) -> None:
    model = network(digits, "mlp")
    guard, first = BroadcastGuard(), sent(model)
    state = guard.admit(first, model, sight(digits), {}, report=lambda name, value: None)
    signs = {name: torch.where(each.abs().cumsum(0) % 0.02 < 0.01, 1.0, -1.0) for name, each in first.params.items()}
    own = {name: 0.01 * tensor for name, tensor in signs.items()}
    state = guard.after(Update(own, "delta", 4), first, state)

    def after(change: float, number: int = 1, share: float = 1.0) -> set[str]:
        moved: Params = {name: tensor + change * signs[name] for name, tensor in first.params.items()}
        own_round = replace(sight(digits), share=share)
        judged = guard.judge(Broadcast(moved, {}, number), model, own_round, state)
        return {finding.code for finding in judged.findings}

    assert "jump" not in after(0.01)
    assert "jump" not in after(0.09)
    assert "jump" in after(0.2)
    assert "jump" in after(0.2, number=4), "all clients are drawn in every round: three cannot have been missed"
    assert "jump" not in after(0.2, number=4, share=0.3), "others have moved it in rounds that this client did not see"
    small = guard.after(Update({name: 0.01 * tensor for name, tensor in own.items()}, "delta", 4), first, state)
    assert small["sizes"] == state["sizes"], "after one small update, as with random rates, the next model is no jump"
    gradients = guard.after(Update(own, "gradient", 4), first, state)
    assert "jump" not in {f.code for f in guard.judge(sent(model, 1), model, None, gradients).findings}


def test_likeness_is_a_share_of_energy() -> None:
    line = torch.randn(1, 64, generator=replayed(0).public())
    noise = torch.randn(32, 64, generator=replayed(1).public())
    assert likeness({"w": line.expand(32, 64)})[1] == pytest.approx(1)
    assert likeness({"w": -line * torch.arange(1, 33)[:, None]})[1] == pytest.approx(1)
    assert likeness({"w": torch.zeros(32, 64)})[1] == pytest.approx(1)
    top = torch.linalg.svdvals(noise / noise.norm(dim=1, keepdim=True))[0]
    assert likeness({"w": noise})[1] == pytest.approx(float(top.square()) / 32, rel=0.1)
    assert likeness({"w": torch.ones(4, 64), "b": torch.ones(64)}) == ("", 0.0), "too few to tell"


def test_a_config_puts_it_at_every_client(tmp_path: Path) -> None:
    path = tmp_path / "guarded.toml"
    path.write_text('[guard]\naction = "warn"\njump = 20.0\n')
    config = load_config(path)
    assert config.guard == BroadcastGuard(action="warn", jump=20.0)
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load_config(again) == config
    path.write_text('[guard]\naction = "shout"\n')
    with pytest.raises(ConfigError, match="guard"):
        load_config(path)


@pytest.mark.parametrize("settings", [{"action": "shout"}, {"alike": 0.0}, {"jump": -1.0}])
def test_settings_are_checked(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        BroadcastGuard(**settings)  # type: ignore[arg-type]
