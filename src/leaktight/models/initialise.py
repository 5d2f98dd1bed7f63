"""Build a network from settings and initialise its weights, or read them from a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Inputs
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensor_files import ERRORS, check_tensors, read_safetensors, read_torch, refusal
from leaktight.core.text import sides
from leaktight.models.source import ModelSource, cannot_take, reason
from leaktight.models.surgery import lazy_names, mode_of

WIDE = 0.5


def build_model(
    source: ModelSource, inputs: Inputs, num_classes: int, *, init: str | Path = "default", rng: Rng
) -> nn.Module:
    """The network of `source` for such inputs, the same for the same `rng`.

    init: "default", the initialisation that the network defines; "wide", every parameter from U(-0.5, 0.5); "kaiming",
    He's normal weights and zero biases, which learn faster at small learning rates; or a file of weights.
    """
    model = _built(source, inputs, num_classes, rng)
    if (change := _INITS.get(str(init))) is not None:
        change(model, rng.child("init"))
    elif Path(init).is_file():
        load_weights(model, init)
    else:
        raise ModelError(
            f"expected init to be {', '.join(_INITS)} or a file of weights, got {str(init)!r}: no such file"
        )
    return model


def _built(source: ModelSource, inputs: Inputs, num_classes: int, rng: Rng) -> nn.Module:
    try:
        with global_seed(rng.child("build")):
            model = source.build(inputs, num_classes)
            return materialised(model, inputs.blank(1, torch.zeros(())), f"{inputs.kind} of {inputs}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "overflow" in str(error):
            raise ModelError(
                "the network needs more memory than there is; make its layers or images smaller"
            ) from error
        raise


def materialised(model: nn.Module, examples: Tensor, words: str) -> nn.Module:
    """The same model; lazy modules get their sizes and weights by a run on `examples`, which errors call `words`."""
    if not lazy_names(model):
        return model
    try:
        with torch.no_grad(), mode_of(model, "eval"):
            model(examples)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise cannot_take(words, error) from error
    if names := lazy_names(model):
        raise ModelError(
            f"expected one run of the model to set the sizes of all lazy modules, got none for {_first_few(names)}; "
            "use these modules in forward, or leave them out"
        )
    return model


def initialise_wide(model: nn.Module, rng: Rng) -> None:
    """Overwrite every parameter of `model` with U(-0.5, 0.5): weights and biases, and the scales and shifts of batch
    norm too, as GRNN does. With large weights sigmoids do not flatten the gradient, so DLG and similar attacks
    converge.
    """
    generator = rng.public()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.rand(parameter.shape, generator=generator) * (2 * WIDE) - WIDE
            parameter.copy_(drawn)


def initialise_kaiming(model: nn.Module, rng: Rng) -> None:
    """Overwrite the weights of convolutions and linear layers with He's N(0, 2 / inputs), their biases with 0."""
    generator = rng.public()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
                if module.bias is not None:
                    module.bias.zero_()


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Overwrite the parameters and buffers of `model` with those of a .pt, .pth, .th, .ckpt or .safetensors file.

    The names must be those of the model, with or without the prefix "module.". Nothing changes unless all fit; only
    batch counters may be missing, as in old files.
    """
    path = Path(path)
    stored = read_weights(path)
    own = model.state_dict()
    missing = [name for name in own if name not in stored and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in stored if name not in own]
    shapes = [
        f"{name} {sides(stored[name].shape)} for {sides(tensor.shape)}"
        for name, tensor in own.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    faults = [f"{kind}: {_first_few(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise ModelError(
            f"the weights in {path} do not fit the model; {'; '.join(faults)}; "
            "choose the model and settings that they were made with"
        )
    model.load_state_dict(stored, strict=False)


def _default(model: nn.Module, rng: Rng) -> None:
    """Keep the weights that `build` drew."""


_INITS: Mapping[str, Callable[[nn.Module, Rng], None]] = {
    "default": _default,
    "given": _default,
    "wide": initialise_wide,
    "kaiming": initialise_kaiming,
}


_READERS: Mapping[str, Callable[[Path], object]] = {
    ".pt": read_torch,
    ".pth": read_torch,
    ".th": read_torch,
    ".ckpt": read_torch,
    ".safetensors": read_safetensors,
}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without an outer "state_dict" and without DataParallel's prefix."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ModelError(f"expected a file of weights ending in {', '.join(_READERS)}, got {path}; convert it")
    if not path.exists():
        raise ModelError(f"expected a file of weights at {path}, got none; check the path")
    try:
        content = reader(path)
        if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
            content = content["state_dict"]
        if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ModelError(
                f"expected a state dict (tensors by name) in {path}, got something else; save model.state_dict()"
            )
        stored = {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
        check_tensors(stored, path)
    except pickle.UnpicklingError as error:
        raise ModelError(str(refusal(path, error))) from None
    except ERRORS as error:
        raise ModelError(
            f"cannot read weights from {path}: {reason(error)}; save a state dict with only tensors"
        ) from error
    return stored


def _first_few(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
