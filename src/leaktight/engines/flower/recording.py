"""`record_updates`: stores the updates that a server receives, for `leaktight inspect`."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Mapping
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


def record_updates(grid: Grid, folder: Path | str) -> Grid:
    """A grid that stores every training message and its reply: `grid = record_updates(grid, "captured")`.

    One folder for each exchange and node, with `before.npz`, `after.npz` (or `update.npz`, in a run of Leaktight) and
    `note.json`, with the other values that were sent and the command to inspect them. The files contain what an
    honest-but-curious server sees: keep them as secret as the data. No message is changed.
    """
    return _Recorder(grid, Path(folder))


class _Recorder(Grid):
    def __init__(self, grid: Grid, folder: Path) -> None:
        self._grid, self._folder = grid, folder
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
                _store(
                    self._folder / f"exchange-{exchange:04d}" / f"node-{message.metadata.dst_node_id}", message, reply
                )
            except Exception:
                LOG.exception("an update could not be recorded; training continues")
        return received


def _store(folder: Path, message: Message, reply: Message) -> None:
    before, after, kind = _tensors(message, reply)
    _write_npz(folder / "before.npz", before)
    _write_npz(folder / f"{'after' if kind is None else 'update'}.npz", after)
    change = f"--after {folder / 'after.npz'}" if kind is None else f"--update {folder / 'update.npz'} --kind {kind}"
    note = {
        "node": str(message.metadata.dst_node_id),
        "message_type": message.metadata.message_type,
        "group": message.metadata.group_id,
        "asked": _plain(message.content),
        "answered": _plain(reply.content),
        "inspect": f"leaktight inspect --model MODULE:FUNCTION --before {folder / 'before.npz'} {change} --shape C,H,W",
    }
    write_private(folder / "note.json", json.dumps(note, indent=1).encode())


def _tensors(message: Message, reply: Message) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], str | None]:
    """The tensors that the client received and sent, and the kind of the latter; None for a whole model."""
    if "leaktight" in message.content:
        asked, answered = read_request(message).request, read_reply(reply)
        if not isinstance(asked, Train) or not isinstance(answered, Trained):
            raise ValueError("expected an update")
        if answered.update.sealed is not None:
            raise ValueError("the update is encrypted")
        got = {**asked.broadcast.params, **asked.broadcast.buffers}
        return got, answered.update.tensors, answered.update.kind
    (sent,), (received,) = message.content.array_records.values(), reply.content.array_records.values()
    return tensors_of(sent), tensors_of(received), None


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
