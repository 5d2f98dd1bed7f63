"""Objects of the user's own, named as "package.module:name". Modules in the current folder are found."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from leaktight.core.errors import UsageError, suggestion


def is_own(name: str) -> bool:
    """Whether a name is meant as "package.module:name", not as one of the catalogue."""
    return ":" in name


def check_target(target: str) -> None:
    """Raise ValueError unless it reads as "package.module:name"."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f'expected "package.module:name", got {target!r}')


def load_own(target: str, error: type[UsageError]) -> object:
    """What "package.module:name" names. A module that is not there or fails, or has no such name, raises `error`."""
    module_name, _, name = target.partition(":")
    with working_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as reason:
            absent = reason.name if isinstance(reason, ModuleNotFoundError) else None
            if absent and f"{module_name}.".startswith(f"{absent}."):
                raise error(
                    f"expected a module {module_name!r} in the current folder or installed, got none; check the name"
                ) from None
            raise error(f"cannot import {module_name!r}: {first_words(reason)}; correct the module") from reason
    found: object = getattr(module, name, None)
    if found is None:
        public = [each for each in vars(module) if not each.startswith("_")]
        raise error(f"module {module_name!r} has no {name!r}; {suggestion(name, public)}")
    return found


def first_words(error: BaseException) -> str:
    """An error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def working_folder_importable() -> Iterator[None]:
    """Put the current folder first on the import path for a while: an installed command does not have it there."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
