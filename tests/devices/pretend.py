"""A pretended accelerator: tensors stay on the CPU and keep their values, but carry the label of another device.

Labels follow storages. Inside the block an operation on tensors of two devices raises, as it would with real ones, and
so do a random draw on the accelerator and NumPy's access to its tensors. What PyTorch creates inside an operation has
no label, and takes that of the first tensor that it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
ACCELERATORS = ("cuda", "mps")
aten = torch.ops.aten


class MixedDevicesError(BaseException):
    """Two devices met in one operation, or something was done that an accelerator cannot do.

    No error that code under test may handle.
    """


FACTORIES = {
    getattr(torch, name)
    for name in (
        *("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "zeros", "tensor", "as_tensor", "asarray"),
        *("rand", "randn", "randint", "randperm", "from_numpy", "frombuffer", "tril_indices", "triu_indices"),
        *("hann_window", "empty_strided", "scalar_tensor"),
    )
} | {torch.fft.fftfreq, torch.fft.rfftfreq}
LIKE = {
    getattr(torch, name)
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
} | {getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")}
TO_NUMPY = {Tensor.numpy, Tensor.__array__}
ANYWHERE = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.is_same_size.default,
    aten.set_.source_Tensor,
    aten.resize_as_.default,
}
INDEXED = {"index", "_index_put_impl_", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"}
"""Their indices may be on the CPU, though the indexed tensor is not."""


def _plain(tensor: Tensor) -> Tensor:
    """The tensor below the wrappers of `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class Labels:
    """The devices of storages. A weak reference keeps the address of a freed one from being used again."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.device | None, StorageWeakRef]] = {}

    def of(self, tensor: Tensor) -> torch.device | None:
        """The device of a tensor, None if any will do. One that was there before the block is on the CPU."""
        with torch._C.DisableTorchFunction():
            found = self.known.get(_plain(tensor).untyped_storage()._cdata)
            if tensor.is_meta:
                return None
        return CPU if found is None else found[0]

    def put(self, tensor: Tensor, device: torch.device | None) -> None:
        with torch._C.DisableTorchFunction():
            if device is not None and device.type == "mps" and tensor.dtype in (torch.float64, torch.complex128):
                raise MixedDevicesError(f"{tensor.dtype} does not exist on {device}")
            storage = _plain(tensor).untyped_storage()
            self.known[storage._cdata] = device, StorageWeakRef(storage)


class _Operations(TorchDispatchMode):
    """Checks the devices of every operation of PyTorch, those of backward passes included, and labels its results."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = None if func in ANYWHERE else self.common(func, args, given)
        if func is aten._to_copy.default and given:
            device = self.labels.of(given[0])
        if device is not None and device.type in ACCELERATORS and torch.Tag.nondeterministic_seeded in func.tags:
            raise MixedDevicesError(f"{func} draws random numbers on {device}; draw on the CPU, then move")
        result = func(*args, **kwargs)
        owned = {self.storage(each) for each in given}
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and self.storage(each) not in owned:
                self.labels.put(each, device)
        if device is not None:
            for each in given:
                if self.labels.of(each) is None:
                    self.labels.put(each, device)
        return result

    def storage(self, tensor: Tensor) -> int:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)

    def common(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> torch.device | None:
        free: list[Tensor] = []
        if func._schema.name.removeprefix("aten::") in INDEXED:
            free = [each for each in pytree.tree_leaves(args[1]) if isinstance(each, Tensor) and self.cpu(each)]
        if torch.Tag.pointwise in func.tags or "where" in func._schema.name or "put" in func._schema.name:
            free += [each for each in given if each.ndim == 0 and self.cpu(each)]
        counted = [each for each in given if not any(each is other for other in free)] or given
        devices = {str(self.labels.of(each)) for each in counted if self.labels.of(each) is not None}
        if len(devices) > 1:
            shapes = [(tuple(each.shape), str(each.dtype), str(self.labels.of(each))) for each in given]
            raise MixedDevicesError(f"{func} on tensors of {sorted(devices)}: {shapes}")
        return torch.device(devices.pop()) if devices else None

    def cpu(self, tensor: Tensor) -> bool:
        return self.labels.of(tensor) in (None, CPU)


class _Calls(TorchFunctionMode):
    """What Python code sees: the pretended device of a tensor, moves, factories."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels

    def device(self, tensor: Tensor) -> torch.device:
        return self.labels.of(tensor) or CPU

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return self.device(args[0])
        for kind in ("cpu", "cuda", "mps"):
            if func == getattr(Tensor, f"is_{kind}").__get__:
                return self.device(args[0]).type == kind
        if func in TO_NUMPY and self.device(args[0]).type != "cpu":
            raise MixedDevicesError(f"NumPy cannot read a tensor on {self.device(args[0])}; use .cpu() first")
        if func is Tensor.to:
            return self.to(*args, **kwargs)
        if func is Tensor.cpu:
            return self.to(args[0], CPU)
        if func in FACTORIES or func in LIKE:
            device = kwargs.pop("device", None)
            if func in LIKE and device is None:
                device = self.device(args[0])
            source = args[0] if args and isinstance(args[0], Tensor) else None
            if func in (torch.as_tensor, torch.asarray) and source is not None:
                return source if device is None else source.to(device)
            generator = kwargs.get("generator")
            device = torch.device(device or CPU)
            if device.type == "meta":
                return func(*args, **kwargs, device=device)
            if generator is not None and generator.device.type != device.type:
                raise MixedDevicesError(f"{func} on {device} with a generator of {generator.device}")
            if device.type != "cpu" and "rand" in getattr(func, "__name__", ""):
                raise MixedDevicesError(f"{func} draws random numbers on {device}; draw on the CPU, then move")
            if func in LIKE and source is not None:
                args = (self.to(source, device), *args[1:])
            result = func(*args, **kwargs)
            self.labels.put(result, indexed(device))
            return result
        return func(*args, **kwargs)

    def to(self, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
        """A move: a copy with another label, unless the tensor is there already."""
        first, *others = rest or (None,)
        if isinstance(first, Tensor):
            others, named = [first.dtype, *others], {"device": self.device(first), **named}
        elif isinstance(first, torch.dtype):
            others = [first, *others]
        else:
            named = {"device": first, **named}
        found = {**dict(zip(("dtype", "non_blocking", "copy"), others, strict=False)), **named}
        before, layout = self.device(tensor), found.get("memory_format") or torch.preserve_format
        device = indexed(found.get("device") or before)
        copy = bool(found.get("copy")) or device != before
        result = Tensor.to(tensor, found.get("dtype") or tensor.dtype, copy=copy, memory_format=layout)
        if device != before:  # a change of type comes first
            self.labels.put(result, device)
        return result


def indexed(device: torch.device) -> torch.device:
    device = torch.device(device)
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)


@contextmanager
def pretending() -> Iterator[Labels]:
    """Let `.to("cuda")` move tensors to a pretended accelerator inside the block."""
    labels = Labels()
    with _Calls(labels), _Operations(labels):
        yield labels
