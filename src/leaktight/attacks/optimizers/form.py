"""What a traced function is made of, so that functions of the same form share one graph.

Tracing sees shapes, not values: a traced function that reads a tensor other than its inputs is an error. So its graph
follows from the shapes of its inputs and from all that is no tensor: settings, numbers, classes, layers.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType

from torch import Tensor, nn

from leaktight.core.faults import raise_fault


@dataclass(frozen=True)
class Form:
    """What something is made of; equal forms give equal graphs.

    text: the parts by value. named: the classes and functions that the text has by identity; while they are kept, no
    other object has their identity.
    """

    text: bytes
    named: tuple[object, ...] = field(compare=False, repr=False)


def form_of(parts: object) -> Form | None:
    """The form of an object with everything that it refers to; None if it cannot be told, as of an open file.

    Of the parameters and buffers of a network only shapes count: they are replaced by inputs in every call. Other
    tensors count by value.
    """
    text = io.BytesIO()
    reader = _Reader(text)
    try:
        reader.dump(parts)
    except Exception as error:  # a user's own object can fail with any kind of error
        raise_fault(error)
        return None
    return Form(text.getvalue(), tuple(reader.named))


class _Reader(pickle.Pickler):
    """Writes an object for comparison only; nobody reads it back."""

    def __init__(self, text: io.BytesIO) -> None:
        super().__init__(text, protocol=5)
        self.named: list[object] = []
        self.replaced: set[int] = set()

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self.named.append(obj)
            return "named", id(obj)
        if isinstance(obj, nn.Module):
            own = (*obj.parameters(recurse=False), *obj.buffers(recurse=False))
            self.replaced.update(id(tensor) for tensor in own)
        if not isinstance(obj, Tensor):
            return None
        shape = str(obj.dtype), str(obj.device), tuple(obj.shape), obj.stride()
        if id(obj) in self.replaced:
            return "replaced", shape
        return "tensor", shape, hashlib.sha256(obj.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
