"""What must stay with a client is searched for, byte by byte, in all that a server gets, keeps, logs and writes."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts.test_defenses import CASES
from tests.engines.flower.test_play import grid_for
from tests.security.test_messages import scene, sent_inprocess, sent_on_flower
from torch import Tensor

from leaktight.core.protocols import Defense
from leaktight.engines.flower.server import play
from leaktight.engines.inprocess import Reports, run
from leaktight.engines.training import train
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.messages import Train, encode
from leaktight.fl.state import ClientState, load_checkpoint
from leaktight.results.folder import open_run

KNOWN = {"delta", "noise_std", "fraction_kept", "fraction_noised", "steps"}
"""Figures that a server can compute from the settings and the model alone."""


@dataclass
class Secrets:
    """All that clients of a run had to themselves."""

    numbers: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    words: list[bytes] = field(default_factory=list)

    def take(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, Mapping):
            for item in value.values():
                self.take(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.take(item)
        elif isinstance(value, bytes):
            self.words.append(value)
        elif isinstance(value, float):
            self.numbers.append(value)

    def patterns(self) -> Iterator[bytes]:
        """Bytes and digits that nothing else gives by chance."""
        for number in self.numbers:
            if number != round(number, 3):
                yield from (struct.pack(form, number) for form in ("<d", ">d"))
                yield repr(number).partition("e")[0].lstrip("-0.")[:10].encode()
        for tensor in self.tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.is_floating_point() and len(flat.unique()) > 3:
                pair = 2 * flat.element_size()
                data = flat.view(torch.uint8).numpy().tobytes()
                yield from (data[start : start + pair] for start in range(0, len(data) - pair + 1, pair // 2))
        for word in self.words:
            yield word
            yield word.hex().encode()

    def found_in(self, data: bytes) -> list[bytes]:
        return [each for each in self.patterns() if len(each) >= 8 and len(set(each)) > 3 and each in data]


@contextmanager
def spied(federation: Federation) -> Iterator[Secrets]:
    """Secrets that fill up while the federation is played."""
    secrets, own_round = Secrets(), Client.train_round

    def told(client: Client, request: Train, state: ClientState | None) -> ClientRound:
        done = own_round(client, request, state)
        figures = {name: value for name, value in done.report.items() if name.rpartition(".")[2] not in KNOWN}
        secrets.take(figures)
        secrets.take(done.state.defense)
        secrets.take(done.state.params)
        secrets.take([rate for rate in done.truth().learning_rates if rate != request.learning_rate])
        secrets.take([client.rng.key, federation.rng.key])
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "train_round", told)
        yield secrets


def files(folder: Path, names: Iterable[str]) -> bytes:
    return b"|".join((folder / name).read_bytes() for name in names)


every_kind = pytest.mark.parametrize("kind", CASES)


@every_kind
def test_no_message_holds_what_is_a_clients_own(kind: str) -> None:
    pytest.importorskip("opacus")
    federation = scene(CASES[kind].defense, FedAvg(scheme="I"))
    with spied(federation) as secrets:
        for played in (sent_inprocess, sent_on_flower):
            data = b"".join(encode({"request": each.request, "reply": each.reply}) for each in played(federation))
            assert secrets.found_in(data) == []
    assert len(list(secrets.patterns())) > 10, "there was something to look for"
    kept = encode({"numbers": secrets.numbers, "tensors": secrets.tensors, "words": secrets.words})
    assert len(secrets.found_in(kept)) > 10, "and the search finds what is there"


@every_kind
def test_a_deployed_server_keeps_nothing_of_it(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opacus")
    federation = scene(CASES[kind].defense, FedAvg(scheme="I"))
    grid = grid_for(federation, state_dir=tmp_path / "nodes")

    def engine(federation: Federation, state: FederationState | None = None, **watchers: Any) -> FederationState:
        del watchers["workers"], watchers["on_reports"]
        return play(grid, federation, state, run="a", **watchers)

    with (
        open_run(tmp_path / "run", "", resume=False) as folder,
        caplog.at_level(logging.DEBUG),
        spied(federation) as secrets,
    ):
        train(federation, folder, engine=engine, defense_kind=kind)
    written = sorted(path.name for path in folder.path.iterdir() if path.name not in (".lock", "secret.key"))
    assert {"checkpoint-00002.state", "summary.json", "model.safetensors"} <= set(written)
    assert secrets.found_in(files(folder.path, written)) == []
    assert secrets.found_in(caplog.text.encode()) == []
    assert load_checkpoint(folder.private(folder.all_private[-1]))["clients"] == {}, "clients are elsewhere"
    summary = json.loads(folder.summary.read_text())
    assert summary["rounds"][0]["client"] == {}
    assert summary["defense"] == {"kind": kind}
    nodes = b"".join(path.read_bytes() for path in (tmp_path / "nodes").iterdir())
    assert len(secrets.found_in(nodes)) > 2, "the nodes have it"


@every_kind
def test_a_simulations_server_keeps_nothing_of_it_either(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    federation = scene(CASES[kind].defense, FedAvg(scheme="I"))
    with open_run(tmp_path / "run", "", resume=False) as folder, spied(federation) as secrets:
        train(federation, folder, workers=1, defense_kind=kind)
    private = folder.private(folder.all_private[-1])
    assert private.stat().st_mode & 0o777 == 0o600
    server = files(folder.path, ["checkpoint-00002.state", "model.safetensors", "environment.json", "config.toml"])
    assert secrets.found_in(server) == []


def test_the_judge_of_a_simulation_hears_reports_beside_the_messages() -> None:
    told: list[Reports] = []
    run(scene(Defense(), FedAvg()), workers=1, on_reports=told.append)
    assert [sorted(reports) for reports in told] == [["client-000", "client-001", "client-002"]] * 2
    assert all({"loss", "seconds", "steps"} <= set(report) for reports in told for report in reports.values())
