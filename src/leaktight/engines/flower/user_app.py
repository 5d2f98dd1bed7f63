"""What mods need of a user's own Flower app: arrays by name, and private state at the node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from torch import Tensor

from leaktight.core.checksum import with_checksum, without_checksum
from leaktight.core.errors import UsageError
from leaktight.core.files import remove_partial, write_private
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State

LOG = logging.getLogger("leaktight.flower")

_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def only_arrays(content: RecordDict, whose: str) -> str:
    """The key of the only ArrayRecord in a message. whose: the message, for errors."""
    found = list(content.array_records)
    if len(found) != 1:
        raise UsageError(f"expected one ArrayRecord in the {whose}, got {len(found)}; send no arrays but the model")
    return str(found[0])


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def is_statistic(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is a batch-norm statistic, not a parameter, by its name and type."""
    return not tensor.is_floating_point() or name.rpartition(".")[2] in _STATISTICS


def unnamed(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all names are numbers, as with `NumPyClient`."""
    return all(name.isdigit() for name in tensors)


def refusal(message: Message) -> Message:
    """An error reply that does not tell the server the reason."""
    return Message(Error(_RAISED, "the client could not answer; its own log says why"), reply_to=message)


class ModState:
    """The private state of one mod at one node: in a private file if there is a folder, and in Flower's context.

    name: of the mod. state_dir: the folder of the file, which survives a restart of the node; default: `state-dir` of
    the node's config. Without either, only the context has the state, as long as the run lasts.
    """

    def __init__(self, name: str, context: Context, state_dir: Path | str | None) -> None:
        folder = state_dir or context.node_config.get("state-dir")
        self.owner = str(context.node_config.get("partition-id", "node"))
        self.key, self.context = f"leaktight.{name}", context.state
        self.path = Path(str(folder)) / f"{name}-{self.owner}.state" if folder else None

    def read(self) -> State | None:
        """The state that was written last, or None."""
        data: object = None
        if self.path is not None and self.path.exists():
            data = self.path.read_bytes()
        elif self.key in self.context.config_records:
            data = self.context.config_records[self.key]["state"]
        if data is None:
            return None
        where = str(self.path or f"{self.key} in Flower's context")
        remedy = "restore it, or give the mod another name to start with an empty one, and a new budget"
        return unpack(without_checksum(data if isinstance(data, bytes) else b"", where, remedy=remedy))

    def write(self, state: State) -> None:
        data = with_checksum(pack(state))
        if self.path is not None:
            remove_partial(self.path.parent, {self.path.name})
            write_private(self.path, data)
        self.context[self.key] = ConfigRecord({"state": data})
