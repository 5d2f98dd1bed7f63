"""Image files in class folders, on disk or in a zip."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.scope import not_supported, outside_file
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.files import Tree, find_source, open_tree, user_path
from leaktight.data.images import decode_image, fit_image, is_image, stack_images
from leaktight.data.settings import SplitSettings, check_channels, check_minimum

Listing = Mapping[str, Sequence[str]]
"""Names of image files by class."""

TEST_FOLDERS = ("test", "val", "valid", "validation")
_PHOTOGRAPHS = frozenset({"image", "images", "img", "imgs"})
_MASKS = frozenset({"mask", "masks", "label", "labels", "annotation", "annotations", "segmentation", "segmentations"})
_PICTURES = frozenset({".tif", ".tiff", ".gif", ".heic", ".avif", ".jp2", ".svg"})
"""Endings of pictures that are not read."""
_NUM_IMAGENET_CLASSES = 1000
_NUMBERED = re.compile(r"(?P<number>\d{3})_(?P<wnid>n\d{8})_(?P<label>.+)\.[^.]+$")


@dataclass(frozen=True, kw_only=True)
class FolderSettings(SplitSettings):
    """A data set of image files. They are decoded one at a time; only the resized bytes stay in memory.

    size: pixels per side; the shorter side is scaled to it and the centre cropped. channels: 3, or 1 for grey.
    max_classes, max_per_class: how many to use, in the order of names; None uses all.
    max_gigabytes: the most memory; a larger data set is an error before the first file is read.
    """

    size: int = 64
    channels: int = 3
    max_classes: int | None = None
    max_per_class: int | None = None
    max_gigabytes: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 1, "size", "max_classes", "max_per_class")
        check_channels(self.channels)
        if not self.max_gigabytes > 0:
            raise ValueError(f"expected max_gigabytes > 0, got {self.max_gigabytes}; raise it")

    def read_listing(
        self,
        name: str,
        tree: Tree,
        train: Listing,
        test: Listing | None = None,
        *,
        class_names: Sequence[str] | None = None,
    ) -> Dataset:
        """The data set of the listed files; without `test` the training files are split.

        class_names: all classes, if there are more than the listed ones.
        """
        _check_listing(name, tree, train)
        chosen = sorted(label for label, names in train.items() if names)[: self.max_classes]
        numbers = {label: number for number, label in enumerate(class_names or chosen)}
        known = tuple(class_names or chosen)
        examples = self._read(tree, train, chosen, numbers)
        if test is None:
            return Dataset(name, *self.divide(examples), known)
        unknown = sorted(set(test) - set(train))
        if unknown:
            raise DataError(
                f"{tree.source}: expected test classes among the {len(train)} training classes, got {unknown[0]!r}"
            )
        return Dataset(name, examples, self._read(tree, test, chosen, numbers), known)

    def _read(self, tree: Tree, listing: Listing, chosen: Sequence[str], numbers: Mapping[str, int]) -> Examples:
        files = [
            (file, numbers[label]) for label in chosen for file in sorted(listing.get(label, ()))[: self.max_per_class]
        ]
        names = [file for file, _ in files]
        shape = (self.channels, self.size, self.size)
        images = stack_images(names, lambda file: self._decode(tree, file), shape, self.max_gigabytes, str(tree.source))
        return Examples(images, torch.tensor([number for _, number in files], dtype=torch.int64))

    def _decode(self, tree: Tree, name: str) -> Tensor:
        return fit_image(decode_image(tree.read(name), tree.where(name), self.channels), self.size, self.size)


def _check_listing(name: str, tree: Tree, listing: Listing) -> None:
    """Raise DataError for a folder without images in class folders, or with those of another task."""
    classes = {label.lower() for label, names in listing.items() if names}
    if len(classes) == 2 and classes & _PHOTOGRAPHS and classes & _MASKS:
        folders = " and ".join(sorted(classes))
        raise DataError(f"{tree.source}: {not_supported(f'segmentation (folders {folders})')}")
    if classes:
        return
    if (outside := next(filter(None, map(outside_file, tree.names)), None)) is not None:
        raise DataError(f"{tree.source}: {outside}")
    wanted = f"{name}: expected image files in class folders in {tree.source}, found"
    if loose := sum(is_image(each) for each in tree.names):
        raise DataError(f"{wanted} {loose} images outside of any; make a folder for each class")
    other = sorted({ending for each in tree.names if (ending := PurePosixPath(each).suffix.lower()) in _PICTURES})
    raise DataError(f"{wanted} only {', '.join(other)}; convert them to PNG" if other else f"{wanted} none; check it")


def _by_class(names: Iterable[str], class_of: Callable[[tuple[str, ...]], str | None]) -> dict[str, list[str]]:
    listing: dict[str, list[str]] = defaultdict(list)
    for name in names:
        label = class_of(PurePosixPath(name).parts) if is_image(name) else None
        if label is not None:
            listing[label].append(name)
    return dict(listing)


def class_folders(tree: Tree) -> tuple[Listing, Listing | None]:
    """Training and test files by class folder; None if there is no test folder.

    Enclosing folders are skipped. A folder `train` and one of `test`, `val`, `valid`, `validation` are the parts;
    without them the folders are the classes.
    """
    depth = _outer_depth([PurePosixPath(name).parts for name in tree.names if is_image(name)])
    tops = {parts[depth] for name in tree.names if is_image(name) and len(parts := PurePosixPath(name).parts) > depth}
    if "train" not in tops:
        return _by_class(tree.names, lambda parts: parts[depth] if len(parts) > depth + 1 else None), None
    train = _by_class(tree.names, lambda parts: _class_below(parts, depth, "train"))
    folder = next((name for name in TEST_FOLDERS if name in tops), None)
    if folder is None:
        return train, None
    test = _by_class(tree.names, lambda parts: _class_below(parts, depth, folder))
    if not test:
        raise DataError(f"{tree.source}: expected class folders in {folder}, got loose images; sort them into classes")
    return train, test


def _outer_depth(paths: Sequence[tuple[str, ...]]) -> int:
    """The number of enclosing folders: all files share them, and class folders are below them."""
    depth = 0
    while paths and all(len(parts) > depth + 2 for parts in paths):
        tops = {parts[depth] for parts in paths}
        if len(tops) > 1 or tops <= {"train", *TEST_FOLDERS}:
            break
        depth += 1
    return depth


def _class_below(parts: tuple[str, ...], depth: int, folder: str) -> str | None:
    return parts[depth + 1] if len(parts) > depth + 2 and parts[depth] == folder else None


@dataclass(frozen=True, kw_only=True)
class ImageFolder(FolderSettings):
    """Your own image files: a folder or a zip of class folders, or of train/ and test/ (or val/) with class folders.

    path: the folder or zip. Without a test folder `test_share` of each class is used for testing.
    """

    path: str

    def load(self, root: Path) -> Dataset:
        source = user_path(self.path, root)
        with open_tree(source) as tree:
            return self.read_listing(source.stem, tree, *class_folders(tree))


@dataclass(frozen=True, kw_only=True)
class TinyImagenet(FolderSettings):
    """Tiny-ImageNet: 200 classes of photographs, 64x64 colour.

    Tests on the validation images if they are present; otherwise the training images are split.
    """

    def load(self, root: Path) -> Dataset:
        source = find_source(
            root, "tiny_imagenet", ("tiny_imagenet", "tiny-imagenet-200"), "train/<class>/images/*.JPEG or a zip of it"
        )
        with open_tree(source) as tree:
            train = _by_class(tree.names, lambda parts: _class_inside(parts, "train"))
            test = _annotated(tree) or _by_class(tree.names, lambda parts: _class_inside(parts, "val"))
            return self.read_listing("tiny_imagenet", tree, train, test or None)


def _class_inside(parts: tuple[str, ...], folder: str) -> str | None:
    """The class of train/<class>/images/file or train/<class>/file."""
    if folder not in parts[:-2]:
        return None
    label = parts[parts.index(folder) + 1]
    return None if label == "images" else label


def _annotated(tree: Tree) -> Listing:
    """The validation images that are present, by their class in val_annotations.txt."""
    table = next((name for name in tree.names if name.endswith("val/val_annotations.txt")), None)
    if table is None:
        return {}
    present = set(tree.names)
    listing: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(tree.text(table).splitlines(), start=1):
        fields = line.split("\t")
        if len(fields) < 2:
            raise DataError(
                f"{tree.where(table)}, line {number}: expected file and class with a tab between, got {line!r}"
            )
        file = str(PurePosixPath(table).parent / "images" / fields[0])
        if file in present:
            listing[fields[1]].append(file)
    return listing


@dataclass(frozen=True, kw_only=True)
class Imagenet(FolderSettings):
    """ImageNet (ILSVRC 2012): 1000 classes of photographs, cut square and scaled to `size`.

    Reads train/<wnid>/ and val/<wnid>/, or single files named like 000_n01440764_tench.JPEG by class number.
    compact: False uses ImageNet's class numbers 0..999; True numbers the classes found from 0.
    """

    size: int = 224
    compact: bool = False

    def load(self, root: Path) -> Dataset:
        source = find_source(
            root, "imagenet", ("imagenet", "imagenet_samples", "ILSVRC2012"), "train/<wnid>/*.JPEG or a zip of images"
        )
        with open_tree(source) as tree:
            if numbered := _numbered(tree):
                return self._numbered(tree, numbered)
            train, test = class_folders(tree)
            if not self.compact and len(train) != _NUM_IMAGENET_CLASSES:
                raise DataError(
                    f"{source}: expected {_NUM_IMAGENET_CLASSES} class folders to know each class's number, got "
                    f"{len(train)}; set compact = true to number those found from 0"
                )
            names = None if self.compact else sorted(train)
            return self.read_listing("imagenet", tree, train, test, class_names=names)

    def _numbered(self, tree: Tree, labels: Mapping[str, re.Match[str]]) -> Dataset:
        listing: dict[str, list[str]] = defaultdict(list)
        class_names = [f"class {number}" for number in range(_NUM_IMAGENET_CLASSES)]
        for match in labels.values():
            class_names[int(match["number"])] = match["label"]
        for name, match in labels.items():
            listing[class_names[int(match["number"])]].append(name)
        return self.read_listing("imagenet", tree, listing, class_names=None if self.compact else class_names)


def _numbered(tree: Tree) -> dict[str, re.Match[str]]:
    matches = {name: _NUMBERED.match(PurePosixPath(name).name) for name in tree.names if is_image(name)}
    return {name: match for name, match in matches.items() if match}


@dataclass(frozen=True, kw_only=True)
class Lfw(FolderSettings):
    """Labelled Faces in the Wild: portraits of public figures, one class per person, scaled to `size`.

    min_per_person: people with fewer pictures are left out.
    """

    min_per_person: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 1, "min_per_person")

    def load(self, root: Path) -> Dataset:
        source = find_source(
            root, "lfw", ("lfw", "lfw-funneled", "lfw-deepfunneled"), "lfw/<person>/<person>_0001.jpg or a zip of it"
        )
        with open_tree(source) as tree:
            people = _by_class(tree.names, lambda parts: parts[-2] if len(parts) > 1 else None)
            chosen = {person: names for person, names in people.items() if len(names) >= self.min_per_person}
            if people and not chosen:
                raise DataError(
                    f"{source}: expected people with at least {self.min_per_person} pictures, got at most "
                    f"{max(len(names) for names in people.values())}; lower min_per_person"
                )
            return self.read_listing("lfw", tree, chosen)


@dataclass(frozen=True, kw_only=True)
class VggFace(FolderSettings):
    """VGG-Face or VGGFace2: faces in one folder per person, scaled to `size`.

    Only the training people are used, and their pictures split: the published test people are others.
    """

    size: int = 112

    def load(self, root: Path) -> Dataset:
        source = find_source(
            root, "vgg_face", ("vgg_face", "vggface2", "VGG-Face2"), "train/<person>/*.jpg or a zip of it"
        )
        with open_tree(source) as tree:
            people, _ = class_folders(tree)
            return self.read_listing("vgg_face", tree, people)
