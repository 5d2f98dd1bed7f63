"""`record_updates`: stores the updates that a server receives, for `leaktight inspect`."""

from __future__ import annotations

import io
import json
import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import Tensor

from leaktight.core.files import write_private
from leaktight.core.text import printable
from leaktight.engines.flower.messages import read_reply, read_request
from leaktight.engines.flower.user_app import tensors_of, unnamed
from leaktight.fl.messages import Train, Trained

LOG = logging.getLogger("leaktight.flower")

_MOST_SHOWN = 100

_LOCAL: Mapping[str, Sequence[str]] = {
    "learning_rate": ("lr", "learning-rate", "learning_rate", "local-lr", "local_lr"),
    "epochs": ("local-epochs", "local_epochs", "epochs"),
    "batch_size": ("batch-size", "batch_size"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay", "weight_decay"),
}
"""By setting of local training, the names that apps use for it."""

_UNSAID = ("samples", "redraw", "schedule")
"""Settings of local training that the number of examples and the learning rate of the round already say."""


def record_updates(
    grid: Grid,
    folder: Path | str,
    *,
    model: str = "",
    shape: Sequence[int] = (),
    config: Mapping[str, object] | None = None,
    options: Sequence[str] = (),
) -> Grid:
    """A grid that stores every training message and its reply: `grid = record_updates(grid, "captured")`.

    model: the network as `leaktight inspect` takes it, "module:function". shape: of one image, (C, H, W). config: the
    app's run config, which may hold local epochs and batch size. options: further options of `leaktight inspect`. The
    command in `note.json` has all of them, with the learning rate and the number of examples that were sent, and then
    runs as it is; what is not known is left as MODULE:FUNCTION and C,H,W.

    One folder for each exchange and node, with `before.npz`, `after.npz` (or `update.npz`, in a run of Leaktight) and
    `note.json`, with the other values that were sent and the command to inspect them. The files contain what an
    honest-but-curious server sees: keep them as secret as the data. No message is changed.
    """
    sizes = ",".join(map(str, shape)) or "C,H,W"
    return _Recorder(grid, Path(folder), _Known(model or "MODULE:FUNCTION", sizes, dict(config or {}), tuple(options)))


@dataclass(frozen=True)
class _Known:
    """What the command of every note says. config: settings of the app by name."""

    model: str
    shape: str
    config: Mapping[str, object]
    options: tuple[str, ...]

    def command(self, folder: Path, kind: str | None, number: int | None, local: Mapping[str, object]) -> str:
        """kind: of the update; None for a whole model. number: of examples. local: what is known of local training."""
        change = ["--after", str(folder / "after.npz")]
        if kind is not None:
            change = ["--update", str(folder / "update.npz"), "--kind", kind]
        words = ["leaktight", "inspect", "--model", self.model, "--before", str(folder / "before.npz"), *change]
        words += ["--shape", self.shape, *([] if number is None else ["--batch-size", str(number)])]
        if kind != "gradient" and "learning_rate" in local:
            known = {name: _capped(value, number) if name == "batch_size" else value for name, value in local.items()}
            given = [f"{name}={value}" for name, value in known.items() if value is not None and name not in _UNSAID]
            words += [word for each in given for word in ("--local", each)]
        return shlex.join([*words, *self.options])


def _capped(size: object, number: int | None) -> object:
    """A batch has no more examples than there are; None if their number is not known."""
    return min(size, number) if isinstance(size, int) and number is not None else None


def _numbers(records: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The numbers in these records by name; the first of a name counts."""
    found: dict[str, object] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, value)
    return found


def _local_of(numbers: Mapping[str, object]) -> dict[str, object]:
    """Settings of local training, as far as an app has numbers of their usual names."""
    found = {key: next((numbers[name] for name in names if name in numbers), None) for key, names in _LOCAL.items()}
    return {key: value for key, value in found.items() if value is not None}


class _Recorder(Grid):
    def __init__(self, grid: Grid, folder: Path, known: _Known) -> None:
        self._grid, self._folder, self._known = grid, folder, known
        self._waiting: dict[str, tuple[int, Message]] = {}
        self._exchanges = len(list(folder.glob("exchange-*")))

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = self._grid.push_messages(sent)
        self._expect(sent)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._record(self._grid.pull_messages(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._expect(sent)
        return self._record(replies)

    def _expect(self, messages: list[Message]) -> None:
        trained = [each for each in messages if each.metadata.message_type.partition(".")[0] == MessageType.TRAIN]
        if trained:
            self._exchanges += 1
            self._waiting |= {each.metadata.message_id: (self._exchanges, each) for each in trained}

    def _record(self, replies: Iterable[Message]) -> list[Message]:
        received = list(replies)
        for reply in received:
            exchange, message = self._waiting.pop(reply.metadata.reply_to_message_id, (0, None))
            if message is None or not reply.has_content():
                continue
            try:
                node = self._folder / f"exchange-{exchange:04d}" / f"node-{message.metadata.dst_node_id}"
                _store(node, message, reply, self._known)
            except Exception:
                LOG.exception("an update could not be recorded; training continues")
        return received


def _store(folder: Path, message: Message, reply: Message, known: _Known) -> None:
    seen = _exchange(message, reply, known.config)
    _write_npz(folder / "before.npz", seen.before)
    _write_npz(folder / f"{'after' if seen.kind is None else 'update'}.npz", seen.sent)
    note = {
        "node": str(message.metadata.dst_node_id),
        "message_type": message.metadata.message_type,
        "group": message.metadata.group_id,
        "asked": _plain(message.content),
        "answered": _plain(reply.content),
        "inspect": known.command(folder, seen.kind, seen.num_examples, seen.local),
    }
    write_private(folder / "note.json", json.dumps(note, indent=1).encode())


@dataclass(frozen=True)
class _Exchange:
    """The tensors that the client received and sent, the kind of the latter (None: a whole model), and its training."""

    before: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]
    kind: str | None
    num_examples: int | None
    local: Mapping[str, object]


def _exchange(message: Message, reply: Message, config: Mapping[str, object]) -> _Exchange:
    if "leaktight" in message.content:
        asked, answered = read_request(message).request, read_reply(reply)
        if not isinstance(asked, Train) or not isinstance(answered, Trained):
            raise ValueError("expected an update")
        if answered.update.sealed is not None:
            raise ValueError("the update is encrypted")
        got, update = {**asked.broadcast.params, **asked.broadcast.buffers}, answered.update
        local = {"learning_rate": asked.learning_rate}
        return _Exchange(got, update.tensors, update.kind, update.num_examples, {**config, **local})
    (sent,), (received,) = message.content.array_records.values(), reply.content.array_records.values()
    records: list[Mapping[str, object]] = [*message.content.config_records.values(), config]
    count = _numbers(reply.content.metric_records.values()).get("num-examples")
    number = int(count) if isinstance(count, int | float) and count >= 1 else None
    return _Exchange(tensors_of(sent), tensors_of(received), None, number, _local_of(_numbers(records)))


def _plain(content: RecordDict) -> dict[str, dict[str, object]]:
    """Settings and metrics of a message, without Leaktight's own records. Long ones are cut: they may be a client's."""
    records: dict[str, Mapping[str, object]] = {**content.config_records, **content.metric_records}
    shown = [(key, record) for key, record in records.items() if not key.startswith("leaktight")]
    return {
        printable(key): {
            printable(name): value if isinstance(value, int | float) else printable(value)
            for name, value in list(record.items())[:_MOST_SHOWN]
            if not isinstance(value, bytes)
        }
        for key, record in shown[:_MOST_SHOWN]
    }


def _write_npz(path: Path, tensors: Mapping[str, Tensor]) -> None:
    file = io.BytesIO()
    if unnamed(tensors):
        np.savez(file, *(tensors[name].numpy() for name in sorted(tensors, key=int)))
    else:
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        np.savez(file, **arrays)
    write_private(path, file.getvalue())
