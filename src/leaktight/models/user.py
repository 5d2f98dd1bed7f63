"""A user's own network, given as "module:function"."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from leaktight.core.errors import ModelError, suggestion
from leaktight.core.types import ImageShape


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """The network that a user's function returns.

    target: "package.module:function", installed or in the current folder. The function gets `shape`
    (channels, height, width) and `num_classes` if it has parameters of these names, and returns an `nn.Module` that
    takes images (N, C, H, W) in [0, 1] and normalises them itself.
    """

    target: str

    def __post_init__(self) -> None:
        check_target(self.target)

    def build(self, shape: ImageShape, num_classes: int) -> nn.Module:
        return built_by(self.target, {"shape": shape, "num_classes": num_classes})


def check_target(target: str) -> None:
    """Raise ValueError unless `target` has the form "package.module:function"."""
    module, colon, function = target.partition(":")
    if not (module and colon and function):
        raise ValueError(f'expected target as "package.module:function", got {target!r}')


def built_by(target: str, known: dict[str, object]) -> nn.Module:
    """The network that "package.module:function" returns; it gets those of `known` that it has parameters for."""
    with _working_folder_importable():
        function = _function(target)
        arguments = _arguments(target, function, known)
        try:
            model = function(**arguments)
        except Exception as error:
            raise ModelError(f"{target} failed: {_reason(error)}; correct the function") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected {target} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _function(target: str) -> Callable[..., object]:
    name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise ModelError(
                f"expected a module {name!r} in the current folder or installed, got none; check the name"
            ) from None
        raise ModelError(f"cannot import {name!r}: {_reason(error)}; correct the module") from error
    function: object = getattr(module, attribute, None)
    if function is None:
        public = [found for found in vars(module) if not found.startswith("_")]
        raise ModelError(f"module {name!r} has no {attribute!r}; {suggestion(attribute, public)}")
    if not callable(function):
        raise ModelError(f"expected {target} to be a function, got {type(function).__name__}")
    return function


def _arguments(target: str, function: Callable[..., object], known: dict[str, object]) -> dict[str, object]:
    """The arguments that the function's signature accepts by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    by_name = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    required = [name for name, p in by_name.items() if p.default is p.empty and name not in known]
    if required:
        raise ModelError(
            f"expected {target} to need no more than {' and '.join(known)}, got {', '.join(required)}; "
            "give the others a default"
        )
    return {name: value for name, value in known.items() if name in by_name}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    """Put the current folder first on the import path inside the block; an installed command does not have it."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
