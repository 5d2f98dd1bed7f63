"""Helpers for named tensors and nested state."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import safetensors.torch
import torch
from torch import Tensor, nn

from leaktight.core.devices import for_float64
from leaktight.core.errors import LeaktightError
from leaktight.core.types import Params, State

_TENSOR_KEY = "__tensor__"
_BYTES_KEY = "__bytes__"
SKELETON = "__state__"


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The trainable tensors of a model by name: detached views, in the model's order."""
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state (batch-norm statistics), by name."""
    saved = model.state_dict()
    return {name: tensor.detach() for name, tensor in model.named_buffers() if name in saved}


def cloned(tensors: Params) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def add(left: Params, right: Params, *, scale: float = 1.0) -> dict[str, Tensor]:
    """left + scale * right; a name that `right` lacks keeps its value."""
    return {name: tensor + scale * right[name] if name in right else tensor for name, tensor in left.items()}


def unflattened(flat: Tensor, like: Params) -> dict[str, Tensor]:
    """A vector as tensors with the names, shapes, types and devices of `like`."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape).to(tensor) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def squared_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares over all tensors, in float64.

    A float32 sum over millions of elements has a relative error of 2e-4.
    """
    parts = [for_float64(tensor).to(torch.float64).square().sum() for tensor in tensors]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def weighted_mean(values: Mapping[str, Params], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The weighted mean of each tensor over the clients that sent it; integer tensors are rounded.

    >>> weighted_mean({"a": {"w": torch.tensor(1.0)}, "b": {"w": torch.tensor(4.0)}}, {"a": 2, "b": 1})
    {'w': tensor(2.)}
    """
    names = {name: None for client in sorted(values) for name in values[client]}
    result: dict[str, Tensor] = {}
    for name in names:
        senders = [client for client in sorted(values) if name in values[client]]
        total = math.fsum(weights[client] for client in senders)
        mean = sum(
            (values[client][name] * (weights[client] / total) for client in senders[1:]),
            values[senders[0]][name] * (weights[senders[0]] / total),
        )
        like = values[senders[0]][name]
        result[name] = mean if like.is_floating_point() else torch.round(mean).to(like.dtype)
    return result


def num_bytes(tensors: Params) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def rms(tensor: Tensor) -> float:
    """The root mean square, above zero."""
    return max(float(tensor.square().mean().sqrt()), 1e-30)


def first_non_finite(tensors: Params) -> str | None:
    """The name of the first tensor with a NaN or an infinity, or None."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def digest(tensors: Params) -> str:
    """A hash of names, types, shapes and every byte: equal digests mean bit-identical tensors."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def flatten_state(state: State) -> tuple[dict[str, Tensor], State]:
    """Split nested state into its tensors, by path, and a skeleton for JSON with the paths in their place."""
    tensors: dict[str, Tensor] = {}

    def walk(value: object, path: str) -> object:
        match value:
            case Tensor():
                tensors[path] = value.detach()
                return {_TENSOR_KEY: path}
            case bytes():
                return {_BYTES_KEY: base64.b64encode(value).decode()}
            case Mapping():
                return {str(key): walk(item, f"{path}/{key}") for key, item in value.items()}
            case list() | tuple():
                return [walk(item, f"{path}/{place}") for place, item in enumerate(value)]
            case None | bool() | int() | float() | str():
                return value
        raise LeaktightError(f"state may hold tensors, numbers, strings and bytes; {path} is a {type(value).__name__}")

    return tensors, {key: walk(item, key) for key, item in state.items()}


def unflatten_state(tensors: Params, skeleton: State) -> State:
    """The inverse of `flatten_state`; tuples come back as lists."""

    def build(value: object) -> object:
        if isinstance(value, Mapping):
            if set(value) == {_TENSOR_KEY}:
                return tensors[value[_TENSOR_KEY]]
            if set(value) == {_BYTES_KEY}:
                return base64.b64decode(value[_BYTES_KEY])
            return {key: build(item) for key, item in value.items()}
        return [build(item) for item in value] if isinstance(value, list) else value

    return {key: build(item) for key, item in skeleton.items()}


def pack(state: State) -> bytes:
    """Nested state as the bytes of a safetensors file, to send or to store.

    >>> unpack(pack({"a": torch.arange(3), "b": {"c": 1}}))
    {'a': tensor([0, 1, 2]), 'b': {'c': 1}}
    """
    tensors, skeleton = flatten_state(state)
    head = torch.frombuffer(bytearray(json.dumps(skeleton).encode()), dtype=torch.uint8)
    return bytes(safetensors.torch.save({SKELETON: head, **_unshared(tensors)}))


def unpack(packed: bytes) -> State:
    """The inverse of `pack`."""
    tensors = safetensors.torch.load(packed)
    skeleton = json.loads(tensors.pop(SKELETON).numpy().tobytes())
    return unflatten_state(tensors, skeleton)


def _unshared(tensors: Params) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for path, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        own = whole and tensor.is_contiguous() and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        result[path] = tensor if own else tensor.clone(memory_format=torch.contiguous_format)
    return result
