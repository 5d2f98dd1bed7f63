"""Messages as bytes: what a carrier moves between server and clients. Never pickle.

>>> decode(encode({"reply": Evaluated(10, 9, 2.5), "round": 3}))
{'reply': Evaluated(num_examples=10, num_correct=9, loss_sum=2.5), 'round': 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Question
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import Batch, Broadcast, Truth, Update
from leaktight.fl.messages import Answered, Ask, Declined, Evaluate, Evaluated, Train, Trained

_TYPE = "__type__"
_MESSAGES: Mapping[str, type] = {
    message.__name__: message
    for message in (
        Answered,
        Ask,
        Batch,
        Broadcast,
        Declined,
        Evaluate,
        Evaluated,
        Question,
        Train,
        Trained,
        Truth,
        Update,
    )
}


def encode(message: Mapping[str, Any]) -> bytes:
    """A mapping whose values may be messages, tensors, numbers, strings, bytes and mappings of these."""
    return pack({"message": _to_plain(message)})


def decode(data: bytes) -> dict[str, Any]:
    """The inverse of `encode`; foreign or damaged bytes are a named error."""
    try:
        message: dict[str, Any] = _from_plain(unpack(data)["message"])
    except LeaktightError:
        raise
    except Exception as error:
        raise LeaktightError(f"not a message of this protocol ({type(error).__name__})") from error
    return message


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and type(value).__name__ in _MESSAGES:
        plain = {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
        return {_TYPE: type(value).__name__, **plain}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    built = {key: _from_plain(item) for key, item in value.items()}
    name = built.pop(_TYPE, None)
    return built if name is None else _MESSAGES[name](**built)
