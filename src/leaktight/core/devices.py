"""Where tensors are computed with: the processor (CPU) or an accelerator.

Values are moved in few places: where a request enters a client's training, where a model is scored, where an
observation enters an attack, and where a guess is judged. Between them, code follows the device of the tensors that it
is given. Random numbers are drawn on the CPU and then moved, so that a seed gives the same ones on every device.
Messages, files and results are on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from leaktight.core.errors import UsageError

T = TypeVar("T")

CPU = torch.device("cpu")
CHOICES = "auto, cpu, cuda, cuda:1 and so on, or mps"
_ACCELERATORS = ("cuda", "mps")


def chosen_device(name: str) -> torch.device:
    """The device of an option `device`; "auto" is the first accelerator that is here, or else the CPU.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return next((torch.device(kind, 0) for kind in _ACCELERATORS if _count(kind)), CPU)
    kind, _, number = name.partition(":")
    numbered = number.isascii() and number.isdigit() and kind != "cpu"
    if kind not in ("cpu", *_ACCELERATORS) or (":" in name and not numbered):
        raise UsageError(f"expected as device {CHOICES}, got {name!r}; use --device cpu")
    here = 1 if kind == "cpu" else _count(kind)
    if not here:
        raise UsageError(
            f"expected a device of this machine, got {name!r}: {kind} is not available here; use --device cpu"
        )
    if number and int(number) >= here:
        numbers = f"the numbers 0 to {here - 1}" if here > 1 else "the number 0"
        raise UsageError(f"expected a device of this machine, got {name!r}: {kind} has {numbers}; use --device {kind}")
    return CPU if kind == "cpu" else torch.device(kind, int(number or 0))


def _count(kind: str) -> int:
    """How many devices of this kind PyTorch can use here."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory(device: torch.device) -> int | None:
    """The free bytes of an accelerator; None for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return None


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Where these tensors are; the CPU if there are none."""
    return next((tensor.device for tensor in tensors.values()), CPU)


def for_float64(tensor: Tensor) -> Tensor:
    """The tensor where it can be made float64: on the CPU if its device has no such numbers (mps)."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def moved(value: T, device: torch.device) -> T:
    """A value with all its tensors on a device: tensors, networks, and dataclasses, mappings, lists and tuples of them.

    Nothing is changed in place. What is there already is returned as it is.
    """
    found: T = _Move(device)(value)
    return found


class _Move:
    """Moves values; one that occurs twice is moved once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[int, tuple[object, object]] = {}  # with the value, which so keeps its id

    def __call__(self, value: Any) -> Any:
        if id(value) not in self.known:
            self.known[id(value)] = value, self._moved(value)
        return self.known[id(value)][1]

    def _moved(self, value: Any) -> Any:
        match value:
            case Tensor():
                return value.to(self.device)
            case nn.Module():
                held = (*value.parameters(), *value.buffers())
                there = all(each.device == self.device for each in held)
                return value if there else copy.deepcopy(value).to(self.device)
            case Mapping():
                after = {key: self(each) for key, each in value.items()}
                return value if all(after[key] is each for key, each in value.items()) else after
            case list() | tuple():
                items = [self(each) for each in value]
                same = all(one is other for one, other in zip(items, value, strict=True))
                return value if same else _rebuilt(value, items)
        return self._fields(value) if is_dataclass(value) and not isinstance(value, type) else value

    def _fields(self, value: Any) -> Any:
        """A dataclass with its fields moved. It is not checked again: its values are the same."""
        before = {field.name: vars(value)[field.name] for field in fields(value) if field.name in vars(value)}
        changes = {name: self(each) for name, each in before.items()}
        if all(changes[name] is each for name, each in before.items()):
            return value
        result = copy.copy(value)
        for name, each in changes.items():
            object.__setattr__(result, name, each)
        return result


def _rebuilt(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """Compute on a device inside the block as on the CPU: networks draw there, and convolutions round and add up in
    one way. On the CPU itself, nothing is changed."""
    if device.type == "cpu":
        yield
        return
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with exact, _DrawnOnCpu():
        yield


_DRAWING: frozenset[Callable[..., Any]] = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        functional.rrelu,
        functional.gumbel_softmax,
        torch.dropout,
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        Tensor.bernoulli,
        Tensor.multinomial,
    }
)
_DRAWING_IN_PLACE: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
    }
)
_CREATING: frozenset[Callable[..., Any]] = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})


class _DrawnOnCpu(TorchFunctionMode):
    """Runs PyTorch's random functions on the CPU, with its generator, and moves what they return."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CREATING:
            device = torch.device(kwargs.get("device") or CPU)
            return moved(func(*args, **{**kwargs, "device": CPU}), device)
        if func not in _DRAWING and func not in _DRAWING_IN_PLACE:
            return func(*args, **kwargs)
        device = next((each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), CPU)
        if device.type == "cpu":
            return func(*args, **kwargs)
        drawn = func(*moved(args, CPU), **moved({name: each for name, each in kwargs.items() if name != "device"}, CPU))
        return args[0].copy_(drawn) if func in _DRAWING_IN_PLACE else moved(drawn, device)
