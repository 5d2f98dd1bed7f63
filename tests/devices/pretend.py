"""A pretended accelerator: tensors stay on the CPU and keep their values, but carry the label of another device.

Inside the block an operation on tensors of two devices raises, as it would on a real accelerator; so do a random draw
there, NumPy's access to its tensors, and float64 on mps. Real values flow, so that data-dependent code runs as it does.
Labels follow storages. A tensor that PyTorch creates inside an operation has no label until it meets one.
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
CUDA = torch.device("cuda", 0)
MPS = torch.device("mps", 0)

_ACCELERATORS = ("cuda", "mps")
_DOUBLE = (torch.float64, torch.complex128)
_FACTORIES = {
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor", "zeros"),
        *("as_tensor", "asarray", "from_numpy", "frombuffer", "tensor", "tril_indices", "triu_indices", "hann_window"),
        *("rand", "randint", "randn", "randperm"),
    )
} | {torch.fft.fftfreq, torch.fft.rfftfreq}
_LIKE = {
    *(getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")),
    *(getattr(Tensor, f"new_{name}") for name in ("empty", "full", "ones", "tensor", "zeros")),
}
_ANYWHERE = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.set_.source_Tensor}
_INDEXED = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")}
"""Their indices may be on the CPU, though the indexed tensor is not."""


class WrongDeviceError(BaseException):
    """Something that an accelerator would not do. It is no `Exception`, so that no code under test can handle it."""


class Labels:
    """The devices of storages. A weak reference keeps the address of a freed one from being used again."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.device | None, StorageWeakRef]] = {}

    def of(self, tensor: Tensor) -> torch.device | None:
        """The device of a tensor; None: any. One that was there before the block, and has not moved, is on the CPU."""
        with torch._C.DisableTorchFunction():
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            if tensor.is_meta:
                return None
            found = self.known.get(tensor.untyped_storage()._cdata)
        return CPU if found is None else found[0]

    def put(self, tensor: Tensor, device: torch.device | None) -> None:
        with torch._C.DisableTorchFunction():
            if device is not None and device.type == "mps" and tensor.dtype in _DOUBLE:
                raise WrongDeviceError(f"{tensor.dtype} does not exist on {device}")
            while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor = torch._C._functorch.get_unwrapped(tensor)
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = device, StorageWeakRef(storage)

    def used(self) -> set[str]:
        """The names of all devices that tensors have been on."""
        return {str(device) for device, _ in self.known.values() if device is not None}


class _Operations(TorchDispatchMode):
    """Checks the devices of every operation, those of backward passes included, and labels what it returns."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels = labels

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        counted = given[:1] if func in _ANYWHERE else given
        device = self._common(func, args, counted)
        if device is not None and device.type in _ACCELERATORS and torch.Tag.nondeterministic_seeded in func.tags:
            raise WrongDeviceError(f"{func} draws random numbers on {device}; draw on the CPU, then move")
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            held = {each.untyped_storage()._cdata for each in given}
            made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
            made = [each for each in made if each.untyped_storage()._cdata not in held]
        for each in made:
            self.labels.put(each, device)
        if device is not None and func not in _ANYWHERE:
            for each in given:
                if self.labels.of(each) is None and not each.is_meta:
                    self.labels.put(each, device)
        return result

    def _common(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> torch.device | None:
        """The device of an operation. Single numbers on the CPU may meet others in elementwise operations."""
        name, free = func._schema.name, []
        if name in _INDEXED:
            free = [each for each in pytree.tree_leaves(args[1]) if isinstance(each, Tensor) and self._on_cpu(each)]
        if torch.Tag.pointwise in func.tags or "where" in name or "put" in name:
            free += [each for each in given if each.ndim == 0 and self._on_cpu(each)]
        counted = [each for each in given if not any(each is other for other in free)] or given
        devices = {device for each in counted if (device := self.labels.of(each)) is not None}
        if len(devices) > 1:
            shown = ", ".join(f"{tuple(each.shape)} on {self.labels.of(each)}" for each in given)
            raise WrongDeviceError(f"{func} mixes devices: {shown}")
        return devices.pop() if devices else None

    def _on_cpu(self, tensor: Tensor) -> bool:
        return self.labels.of(tensor) in (None, CPU)


class _Calls(TorchFunctionMode):
    """What Python code sees: the device of a tensor, moves, factories."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES or func in _LIKE:
            return self._created(func, args, kwargs)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.cpu:
            return self._to(args[0], CPU)
        if func in (Tensor.numpy, Tensor.__array__) and self._device(args[0]) != CPU:
            raise WrongDeviceError(f"NumPy cannot read a tensor on {self._device(args[0])}; use .cpu() first")
        if func == Tensor.device.__get__:
            return self._device(args[0])
        for kind in ("cpu", *_ACCELERATORS):
            if func == getattr(Tensor, f"is_{kind}").__get__:
                return self._device(args[0]).type == kind
        return func(*args, **kwargs)

    def _device(self, tensor: Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            real = tensor.device
        return real if real.type == "meta" else self.labels.of(tensor) or CPU

    def _to(self, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
        """A move: a copy with another label, unless the tensor is there already. A change of type comes first."""
        first, *others = rest or (None,)
        if isinstance(first, Tensor):
            others, named = [first.dtype, *others], {"device": self._device(first), **named}
        elif isinstance(first, torch.dtype):
            others = [first, *others]
        else:
            named = {"device": first, **named}
        found = {**dict(zip(("dtype", "non_blocking", "copy"), others, strict=False)), **named}
        before, layout = self._device(tensor), found.get("memory_format") or torch.preserve_format
        device = _numbered(found.get("device") or before)
        copy = bool(found.get("copy")) or device != before
        result = Tensor.to(tensor, found.get("dtype") or tensor.dtype, copy=copy, memory_format=layout)
        if device != before:
            self.labels.put(result, device)
        return result

    def _created(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source = args[0] if args and isinstance(args[0], Tensor) else None
        asked, generator = kwargs.pop("device", None), kwargs.get("generator")
        if source is not None and func in (torch.as_tensor, torch.asarray):
            return source if asked is None else self._to(source, asked)
        device = _numbered(asked or (self._device(source) if source is not None and func in _LIKE else CPU))
        if device.type == "meta":
            made: Tensor = func(*args, **kwargs, device=device)
            return made
        if device.type in _ACCELERATORS and (generator is not None or "rand" in func.__name__):
            raise WrongDeviceError(f"{func.__name__} draws random numbers on {device}; draw on the CPU, then move")
        if source is not None and func in _LIKE:
            args = (self._to(source, device), *args[1:])
        result: Tensor = func(*args, **kwargs)
        self.labels.put(result, device)
        return result


def _numbered(device: torch.device | str) -> torch.device:
    """As PyTorch names the device of a tensor.

    >>> _numbered("cuda"), _numbered("cpu")
    (device(type='cuda', index=0), device(type='cpu'))
    """
    found = torch.device(device)
    return torch.device(found.type, found.index or 0) if found.type in _ACCELERATORS else found


@contextmanager
def pretending() -> Iterator[Labels]:
    """Let `.to("cuda")` and `.to("mps")` move tensors to pretended accelerators inside the block."""
    labels = Labels()
    with _Calls(labels), _Operations(labels):
        yield labels
