"""Which victims are alike, so that one traced function serves them all: they differ in tensors, and in nothing else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from leaktight.attacks.matching.problem import Problem
from leaktight.core.tensors import digest


def groups(problems: Sequence[Problem], size: int) -> list[list[int]]:
    """The places of problems that are alike, together, at most `size` in a group; in order of their first."""
    found: dict[bytes | int, list[list[int]]] = {}
    for place, problem in enumerate(problems):
        kin = found.setdefault(_print(problem) or place, [[]])
        if len(kin[-1]) == size:
            kin.append([])
        kin[-1].append(place)
    return sorted(group for kin in found.values() for group in kin)


def _print(problem: Problem) -> bytes | None:
    """Equal for problems that are alike: everything but the values of the tensors that a search takes as its inputs.

    None where the network cannot be pickled, and so not be compared.
    """
    pickler = _Pickler(_inputs(problem))
    try:
        pickler.dump(problem)
    except Exception:  # a network of the user's own may hold anything
        return None
    return pickler.data.getvalue()


def _inputs(problem: Problem) -> list[Tensor]:
    tensors = [] if problem.labels is None else [problem.labels]
    for _, view, _ in problem.views:
        model = view.trainer.model
        tensors += [*view.params.values(), *view.buffers.values(), *view.target.values(), *view.weights.values()]
        tensors += [unknown.start for unknown in view.unknowns.values()]
        tensors += [tensor for name, tensor in model.named_parameters() if name in {**view.params, **view.buffers}]
        tensors += [tensor for name, tensor in model.named_buffers() if name in view.buffers]
    return tensors


class _Pickler(pickle.Pickler):
    """Writes the shape of a tensor that is an input, and the value of any other, such as a constant of the network."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.data = io.BytesIO()
        self.inputs = {id(tensor) for tensor in inputs}
        super().__init__(self.data)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        kind = (str(obj.dtype), tuple(obj.shape))
        return kind if id(obj) in self.inputs else (*kind, digest({"": obj}))
