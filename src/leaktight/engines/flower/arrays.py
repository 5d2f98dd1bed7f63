"""The arrays of a user's own Flower messages, by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from leaktight.core.errors import UsageError

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def only_arrays(content: RecordDict, whose: str) -> str:
    """The key of the one record of arrays in a message."""
    found = list(content.array_records)
    if len(found) != 1:
        raise UsageError(f"expected one ArrayRecord in the {whose}, got {len(found)}; send the model alone as arrays")
    return str(found[0])


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()})


def is_statistic(name: str, tensor: Tensor) -> bool:
    """Whether this is a buffer of a normalisation and no parameter, as far as its name and type tell."""
    return not tensor.is_floating_point() or name.rpartition(".")[2] in _STATISTICS


def unnamed(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the names are mere numbers, as with `NumPyClient`."""
    return all(name.isdigit() for name in tensors)
