"""A user's own network: "package.module:function", or an `nn.Module`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Inputs
from leaktight.core.own import check_target, first_words, load_own, working_folder_importable
from leaktight.core.tensors import digest
from leaktight.models.surgery import copied, lazy_names


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

    def record(self) -> dict[str, str]:
        return {"kind": self.target}

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module:
        return built_by(self.target, {"shape": inputs.shape, "num_classes": num_classes})


@dataclass(frozen=True)
class GivenModel:
    """A network in memory. Clients start from its weights; the module itself is never changed."""

    module: nn.Module

    def record(self) -> dict[str, str]:
        lazy = lazy_names(self.module)
        weights = {name: tensor for name, tensor in self.module.state_dict().items() if name not in lazy}
        return {"kind": type(self.module).__name__, "weights": digest(weights)}

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module:
        return copied(self.module)


def built_by(target: str, known: Mapping[str, object]) -> nn.Module:
    """The network that "package.module:function" returns; it gets those of `known` that it has parameters for."""
    function = load_own(target, ModelError)
    if not callable(function):
        raise ModelError(f"expected {target} to be a function, got {type(function).__name__}")
    arguments = _arguments(target, function, known)
    with working_folder_importable():
        try:
            model = function(**arguments)
        except Exception as error:
            raise ModelError(f"{target} failed: {first_words(error)}; correct the function") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected {target} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _arguments(target: str, function: Callable[..., object], known: Mapping[str, object]) -> Mapping[str, object]:
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
