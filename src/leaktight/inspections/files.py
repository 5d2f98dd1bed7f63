"""Reading captured files: tensors by name or in order, and true images. No code in them is executed."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from leaktight.core.errors import DataError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.reading import opened, read_limited
from leaktight.core.tensor_files import (
    ERRORS,
    MOST_FILE,
    check_tensors,
    read_npz,
    read_safetensors,
    read_torch,
    refusal,
)
from leaktight.core.tensors import digest as digest_of
from leaktight.core.text import sides
from leaktight.core.types import Params
from leaktight.data.images import IMAGE_SUFFIXES, MOST_IMAGE, decode_image, from_array, is_image, to_tensor

_WRAPPERS = ("state_dict", "model_state_dict", "model", "parameters")
_PREFIXES = ("module.", "_orig_mod.", "_module.")
"""Prefixes that DataParallel, torch.compile and Opacus put before every name."""

_NUMBERED = re.compile(r"arr_(\d+)")


Tensors: TypeAlias = Path | str | Params | Sequence[Tensor | np.ndarray]
"""Tensors by name (a state dict) or in the order of the model, or a file of them: .pt, .pth, .safetensors, .npz."""


@dataclass(frozen=True)
class TensorFile:
    """The tensors of a file. ordered: they have no names (Flower's arrays, a list), only an order.

    digest: of the file's bytes, in hexadecimal.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    ordered: bool
    digest: str


def read_tensors(path: Path) -> TensorFile:
    """The tensors of a .pt, .pth, .safetensors or .npz file. Pickles of anything else are refused."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"expected a file of tensors ending in {', '.join(_READERS)}, got {path}; convert it")
    if not path.exists():
        raise UsageError(f"expected a file of tensors at {path}, got none; check the path")
    try:
        tensors, ordered = _named(path, reader(path))
        check_tensors(tensors, path)
    except pickle.UnpicklingError as error:
        raise refusal(path, error) from None
    except ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"cannot read tensors from {path}: {reason}; save a state dict of tensors alone") from None
    if not tensors:
        raise UsageError(f"expected tensors in {path}, got none; save model.state_dict()")
    dense = {name: _dense(tensor) for name, tensor in tensors.items()}
    return TensorFile(path, dense, ordered, _digest(path))


def _digest(path: Path) -> str:
    with opened(path, MOST_FILE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_file(source: Tensors, name: str) -> TensorFile:
    """The tensors of a file, or the given ones. name: what errors and results call them instead of a path."""
    if isinstance(source, Path | str):
        return read_tensors(Path(source))
    tensors = _in_memory(source, name)
    if lazy := [key for key, tensor in tensors.items() if is_lazy(tensor)]:
        raise UsageError(f"{name}: expected tensors, got lazy ones without a size ({lazy[0]}); run the model once")
    dense = {key: _dense(tensor) for key, tensor in tensors.items()}
    return TensorFile(Path(name), dense, not isinstance(source, Mapping), digest_of(dense))


def _in_memory(source: object, name: str) -> dict[str, Tensor]:
    """Tensors by name, or by their place in a list; UsageError for anything else."""
    if isinstance(source, Mapping):
        items = {str(key): each for key, each in source.items()}
    elif isinstance(source, Sequence):
        items = {f"arr_{place}": each for place, each in enumerate(source)}
    else:
        raise UsageError(
            f"{name}: expected tensors by name, a list of them or a file, got a {type(source).__name__}; give all "
            "tensors of the model"
        )
    for key, each in items.items():
        if not isinstance(each, Tensor | np.ndarray):
            raise UsageError(f"{name}: expected tensors, got a {type(each).__name__} as {key}; leave none out")
    return _without_prefix({key: torch.as_tensor(each) for key, each in items.items()})


def _read_npz(path: Path) -> object:
    arrays = read_npz(path)
    tensors = {name: torch.from_numpy(_native(array)) for name, array in arrays.items()}
    places = {name: found for name in tensors if (found := _NUMBERED.fullmatch(name))}
    if tensors and len(places) == len(tensors):
        return [tensors[name] for name in sorted(tensors, key=lambda name: int(places[name].group(1)))]
    return tensors


_READERS: Mapping[str, Callable[[Path], object]] = {
    ".pt": read_torch,
    ".pth": read_torch,
    ".safetensors": read_safetensors,
    ".npz": _read_npz,
}


def _native(array: np.ndarray) -> np.ndarray:
    """A copy in the machine's byte order."""
    return np.array(array, dtype=array.dtype.newbyteorder("="))


def _named(path: Path, content: object) -> tuple[dict[str, Tensor], bool]:
    """Tensors by name, and whether the names are only their positions."""
    if isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
        if all(isinstance(value, Tensor) for value in inner.values()):
            return _without_prefix({str(name): tensor for name, tensor in inner.items()}), False
    elif isinstance(content, list | tuple) and all(isinstance(value, Tensor) for value in content):
        return {f"arr_{place}": tensor for place, tensor in enumerate(content)}, True
    raise UsageError(f"expected a dict or list of tensors in {path}, got other content; save model.state_dict()")


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            return _without_prefix({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    return tensors


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()


@dataclass(frozen=True)
class TrueExamples:
    """The examples behind a captured update: images (N, C, H, W) in [0, 1], and labels (N,) if given."""

    images: Tensor
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.images)


def read_truth(source: Tensor | Path | str, inputs: Images) -> TrueExamples:
    """The true images: (N, C, H, W) in [0, 1], or a picture, a folder of pictures in the order of their names, an .npz.

    An .npz holds `images` (or a single array), and optionally `labels`. Images of another size are errors.
    """
    if isinstance(source, Tensor):
        return TrueExamples(_true_images(source.detach(), inputs), None)
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if is_image(file.name))
        if not files:
            raise DataError(f"expected pictures ({', '.join(sorted(IMAGE_SUFFIXES))}) in {path}, got none")
        return TrueExamples(inputs.loaded(torch.stack([_picture(file, inputs) for file in files])), None)
    if not path.is_file():
        raise DataError(f"expected true images at {path}, got no such file or folder; check the path")
    if is_image(path.name):
        return TrueExamples(inputs.loaded(_picture(path, inputs)[None]), None)
    if path.suffix.lower() == ".npz":
        return _arrays(path, inputs)
    raise DataError(f"expected true images as a picture, a folder of pictures or an .npz, got {path}; convert them")


def _true_images(images: Tensor, inputs: Images) -> Tensor:
    _check_size("truth", tuple(images.shape[1:]), inputs)
    images = Images.checked(images).to("cpu", torch.float32)
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise DataError(
            f"truth: expected images in [0, 1], got {float(images.min()):g} to {float(images.max()):g}; undo the "
            "normalisation"
        )
    return images


def read_decoys(source: Tensor | Path | str, inputs: Images) -> TrueExamples:
    """Images of the same kind as the true ones: as `read_truth`, or a folder with a folder of pictures for each class.

    Classes are numbered in the order of their names, or by them if all names are numbers.
    """
    folders = [] if isinstance(source, Tensor) else sorted(each for each in Path(source).glob("*") if each.is_dir())
    if not folders:
        return read_truth(source, inputs)
    numbered = all(each.name.isdecimal() for each in folders)
    parts = [(int(each.name) if numbered else place, read_truth(each, inputs)) for place, each in enumerate(folders)]
    labels = [torch.full((len(part),), label) for label, part in parts]
    return TrueExamples(torch.cat([part.images for _, part in parts]), torch.cat(labels))


def _picture(file: Path, inputs: Images) -> Tensor:
    image = to_tensor(decode_image(read_limited(file, MOST_IMAGE, DataError), str(file), inputs.channels))
    _check_size(str(file), tuple(image.shape), inputs)
    return image


def _arrays(path: Path, inputs: Images) -> TrueExamples:
    try:
        arrays = read_npz(path)
    except ERRORS as error:
        raise DataError(f"{path}: expected a readable .npz without objects, got {error}; save it again") from None
    key = "images" if "images" in arrays else next(iter(arrays), "")
    if key != "images" and len(arrays) != 1:
        raise DataError(f"{path}: expected an array 'images', got {', '.join(arrays) or 'nothing'}; name it so")
    images = from_array(arrays[key], f"{path} [{key}]")
    _check_size(str(path), tuple(images.shape[1:]), inputs)
    if not len(images):
        raise DataError(f"{path}: expected at least one true image, got none; leave --truth out")
    labels = arrays.get("labels")
    if labels is None:
        return TrueExamples(inputs.loaded(images), None)
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(
            f"{path}: expected labels to be {len(images)} integers, one per image, got {labels.dtype} of shape "
            f"{sides(labels.shape)}"
        )
    return TrueExamples(inputs.loaded(images), torch.from_numpy(labels.astype(np.int64)))


def _check_size(source: str, size: tuple[int, ...], inputs: Images) -> None:
    if size != inputs.shape:
        raise DataError(
            f"{source}: expected {inputs} as in --shape, got {'x'.join(map(str, size))}; give the images as "
            "the network saw them, or correct --shape"
        )
