"""Whether a network that was sent is the one that was agreed on: tensors, modules, their attributes and their hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.text import sides
from leaktight.core.types import Broadcast, Params

_TENSORS = ("_parameters", "_buffers", "_modules")
_PLAIN = (Tensor, nn.Parameter)


def architecture_change(broadcast: Broadcast, agreed: nn.Module) -> str | None:
    """The first difference of what was sent from the network that was agreed on, or None."""
    for known, sent, kind in (
        (parameters_of(agreed), broadcast.params, "parameter"),
        (buffers_of(agreed), broadcast.buffers, "buffer"),
    ):
        if (change := _tensor_change(known, sent, kind)) is not None:
            return change
    return None if broadcast.model is None else _module_change(broadcast.model, agreed)


def _tensor_change(known: Params, sent: Params, kind: str) -> str | None:
    for name in [*sent, *known]:
        if name not in known or name not in sent:
            return f"{kind} {name!r} {'was added' if name in sent else 'is missing'}"
        if known[name].shape != sent[name].shape:
            return f"{name!r} has shape {sides(sent[name].shape)} instead of {sides(known[name].shape)}"
        if known[name].dtype != sent[name].dtype or type(sent[name]) not in _PLAIN:
            return f"{name!r} is {_words(sent[name])} instead of {_words(known[name])}"
    return None


def _words(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of {tensor.dtype}"


def _module_change(sent: nn.Module, agreed: nn.Module) -> str | None:
    """The first difference of two networks in their modules, or None. Values of the agreed tensors may differ."""
    theirs, ours = dict(sent.named_modules()), dict(agreed.named_modules())
    if list(theirs) != list(ours):
        odd = next(iter(set(theirs) ^ set(ours)), "")
        return f"the network that was sent has other modules than the one agreed on ({odd!r})"
    for name, module in ours.items():
        if type(theirs[name]) is not type(module):
            return f"module {name!r} is another class than the one agreed on"
        for part, mine, other in _attributes(module, theirs[name]):
            if not _same(mine, other):
                return f"{part!r} of module {name!r} is not the one agreed on"
    return _held_change(sent, agreed)


def _held_change(sent: nn.Module, agreed: nn.Module) -> str | None:
    """The first difference in the tensors that two networks hold: their names, and values of those that are fixed."""
    theirs, ours = _held(sent), _held(agreed)
    if (odd := next(iter(theirs.keys() ^ ours.keys()), None)) is not None:
        return f"the network that was sent holds other tensors than the one agreed on ({odd!r})"
    learnt = {*parameters_of(agreed), *buffers_of(agreed)}
    for name in ours.keys() - learnt:
        if type(theirs[name]) not in _PLAIN or not torch.equal(theirs[name], ours[name]):
            return f"the fixed tensor {name!r} is not the one agreed on"
    return None


def _held(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a network by name; one under two names is there once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


_MISSING = object()


def _attributes(ours: nn.Module, theirs: nn.Module) -> Iterator[tuple[str, object, object]]:
    """The name of each attribute of either module, hooks included, with both values."""
    mine, other = vars(ours), vars(theirs)
    for name in dict.fromkeys([*other, *mine]):
        if name == "training":
            continue
        if name in _TENSORS and name in mine and name in other:
            yield name, list(mine[name]), list(other[name])
        else:
            yield name, mine.get(name, _MISSING), other.get(name, _MISSING)


def _same(mine: object, other: object) -> bool:
    """Whether two attributes are alike: equal, or of one class with like parts."""
    if mine is other:
        return True
    if type(mine) is not type(other):
        return False
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(mine, other)
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        counted = all(isinstance(key, int) for key in (*mine, *other))  # hooks have numbers that are counted up
        known = len(mine) == len(other) if counted else list(mine) == list(other)
        return known and all(map(_same, mine.values(), other.values()))
    if isinstance(mine, list | tuple) and isinstance(other, list | tuple):
        return len(mine) == len(other) and all(map(_same, mine, other))
    if isinstance(mine, nn.Module) and isinstance(other, nn.Module):
        return _module_change(other, mine) is None
    parts = None if callable(mine) else getattr(mine, "__dict__", None)
    return bool(mine == other) or (bool(parts) and _same(parts, vars(other)))
