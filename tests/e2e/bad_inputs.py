"""What a newcomer gives that Leaktight cannot take: each is one clear line and exit code 2, before any work.

`python -m tests.e2e.bad_inputs` prints what each command says.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench.faults.hostile.case import Case
from PIL import Image
from torch import nn

from leaktight.cli.app import main

MODULE = "own_net"
NETWORKS = """
import torch
from torch import nn

class Gives(nn.Module):
    def __init__(self, num_classes, give):
        super().__init__()
        self.features, self.head, self.give = nn.Flatten(), nn.Linear(64, num_classes), give

    def forward(self, inputs):
        return self.give(self.head(self.features(inputs)))

def plain(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def one_output():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

def flat_output():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))

def five_outputs():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

def masks(num_classes):
    return nn.Sequential(nn.Conv2d(1, num_classes, 1))

def named_masks(num_classes):
    return Gives(num_classes, lambda out: {"out": out[:, :, None, None].expand(-1, -1, 8, 8)})

def boxes(num_classes):
    return Gives(num_classes, lambda out: [{"boxes": one[:4], "labels": one, "scores": one} for one in out])

def logits_in_a_dict(num_classes):
    return Gives(num_classes, lambda out: {"logits": out})

def two_heads(num_classes):
    return Gives(num_classes, lambda out: (out, out))

def sequence(num_classes):
    return Gives(num_classes, lambda out: out[:, None].expand(-1, 7, -1))

def words(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Embedding(50, 4), nn.Flatten(), nn.Linear(256, num_classes))

def columns(num_classes):
    return nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, num_classes))

class Both(Gives):
    def forward(self, inputs):
        out = super().forward(inputs)
        return (out, out) if self.training else out

def helped_in_training(num_classes):
    return Both(num_classes, lambda out: out)

def losses_in_training(num_classes):
    class Losses(Gives):
        def forward(self, inputs, targets=None):
            if self.training and targets is None:
                raise ValueError("targets should not be none when in training mode")
            return super().forward(inputs)
    return Losses(num_classes, lambda out: out)

def lazy(num_classes):
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))

def lazy_too_large(num_classes):
    return nn.Sequential(nn.LazyConv2d(4, 30), nn.Flatten(), nn.LazyLinear(num_classes))
"""

Words = Sequence[str]
COUNT = 200
LABELS = np.arange(COUNT) % 4
DRY = ("--dry-run",)
TWO = ("--classes", "2")


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, *shape)).astype(np.uint8)


def own_network(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text(NETWORKS)


def _arrays(arrays: Mapping[str, np.ndarray], command: Words, folder: Path) -> Words:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    return [*command, "--set", "data.kind=arrays", "--set", "data.path=data.npz", *DRY]


def _file(name: str, content: bytes, folder: Path) -> Words:
    (folder / name).write_bytes(content)
    return ["audit", "--set", "data.kind=arrays", "--set", f"data.path={name}", *DRY]


def _generator(arrays: Mapping[str, np.ndarray], folder: Path) -> Words:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    settings = ["--set", "data.kind=arrays", "--set", "data.path=data.npz"]
    return ["generator", "train", *settings, "--epochs", "1", "--out", "g.safetensors"]


def _exported(arrays: Mapping[str, np.ndarray], folder: Path) -> Words:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    (folder / "my.toml").write_text('[data]\nkind = "arrays"\npath = "data.npz"\n')
    return ["flower", "export", "app", "my.toml"]


def _pictures(files: Mapping[str, tuple[int, int] | bytes], folder: Path, *words: str) -> Words:
    for name, content in files.items():
        path = folder / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            Image.fromarray(np.zeros(content, np.uint8)).save(path)
    (folder / "pictures").mkdir(exist_ok=True)
    return ["audit", "--set", "data.kind=image_folder", "--set", "data.path=pictures", *words, *DRY]


def _cifar(present: Sequence[str], folder: Path) -> Words:
    place = folder / "data" / "cifar-10-batches-py"
    place.mkdir(parents=True)
    batch = {"data": np.zeros((20, 3072), np.uint8), "labels": list(range(10)) * 2}
    for name in present:
        (place / name).write_bytes(pickle.dumps(batch))
    return ["audit", "--set", "data.kind=cifar10", *DRY]


def _network(function: str, folder: Path, command: str = "audit") -> Words:
    own_network(folder)
    arrays = {"images": images(8, 8), "labels": LABELS}
    return [
        *_arrays(arrays, [command], folder),
        "--set",
        f"model.kind={MODULE}:{function}",
        "--set",
        "local.batch_size=2",
    ]


def _setting(words: Words, folder: Path) -> Words:
    return [*words, *DRY]


def _weights(save: Callable[[nn.Module, Path], None], folder: Path) -> Words:
    save(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), folder / "model.pt")
    return [*_network("plain", folder), "--set", "model.init=model.pt"]


def _script(model: nn.Module, path: Path) -> None:
    torch.jit.script(model).save(path)


def _inspected(words: Words, folder: Path, *, function: str = "plain", rows: int = 4) -> Words:
    """An inspection of a proper update, with some words of its own."""
    own_network(folder)
    before = {"1.weight": torch.randn(rows, 64), "1.bias": torch.zeros(rows)}
    torch.save(before, folder / "before.pt")
    torch.save({name: tensor + 0.1 for name, tensor in before.items()}, folder / "after.pt")
    files = [] if "--before" in words else ["--before", "before.pt"]
    shape = [] if "--shape" in words else ["--shape", "1,8,8"]
    model = [] if "--model" in words else ["--model", f"{MODULE}:{function}"]
    return ["inspect", *model, *files, "--after", "after.pt", *shape, *words, *DRY]


def _inspected_file(save: Callable[[nn.Module, Path], None], folder: Path) -> Words:
    save(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), folder / "model.pt")
    return _inspected(["--before", "model.pt"], folder)


def _inspected_network(function: str, tensors: Mapping[str, torch.Tensor], folder: Path, *, words: Words = ()) -> Words:
    own_network(folder)
    torch.save(dict(tensors), folder / "before.pt")
    torch.save({name: tensor + 0.1 for name, tensor in tensors.items()}, folder / "after.pt")
    files = ["--before", "before.pt", "--after", "after.pt"]
    return ["inspect", "--model", f"{MODULE}:{function}", *files, "--shape", "1,8,8", *words, *DRY]


def _truth(files: Mapping[str, tuple[int, int] | bytes], folder: Path) -> Words:
    _pictures(files, folder)
    return _inspected(["--truth", "pictures"], folder)


GREY = images(8, 8)
TABLE = np.random.default_rng(0).normal(size=(COUNT, 13))
TOKENS = np.random.default_rng(0).integers(0, 5000, (COUNT, 20))
MANY = np.random.default_rng(0).integers(0, 2, (COUNT, 4))
OUTSIDE = "not supported yet: "


def _data(name: str, names: str, commands: Words = ("audit",), **arrays: np.ndarray) -> Case:
    given = {"images": GREY, "labels": LABELS, **arrays}
    return Case("data", f"{name} ({' '.join(commands)})", partial(_arrays, given, commands), names)


DATA = (
    _data("a table of numbers", f"{OUTSIDE}tables", images=TABLE),
    _data("a table of numbers", f"{OUTSIDE}tables", ["train"], images=TABLE),
    _data("a table of numbers", f"{OUTSIDE}tables", ["tradeoff"], images=TABLE),
    _data("token ids", f"{OUTSIDE}tokens", images=TOKENS),
    _data("token ids", f"{OUTSIDE}tokens", ["train"], images=TOKENS),
    _data("one long signal each", f"{OUTSIDE}", images=TABLE[:, :1].ravel()),
    _data("a number to predict", f"{OUTSIDE}regression", labels=TABLE[:, 0]),
    _data("a number to predict", f"{OUTSIDE}regression", ["train"], labels=TABLE[:, 0]),
    _data("several classes each", f"{OUTSIDE}multi-label", labels=MANY),
    _data("several classes each", f"{OUTSIDE}multi-label", ["tradeoff"], labels=MANY),
    _data("one-hot classes", "argmax(1)", labels=np.eye(4, dtype=np.int64)[LABELS]),
    _data("a mask each", f"{OUTSIDE}segmentation", labels=images(8, 8) % 4),
    _data("boxes", f"{OUTSIDE}detection", labels=np.zeros((COUNT, 3, 4))),
    _data("four channels", "1 or 3 channels, got 4", images=images(8, 8, 4)),
    _data("twelve channels", "1 or 3 channels, got 12", images=images(12, 8, 8)),
    _data("volumes", f"{OUTSIDE}", images=images(4, 8, 8, 1)),
    _data("images of 32-bit integers", "convert them", images=GREY.astype(np.int32)),
    _data("normalised images", "[0, 1]", images=(GREY / 255 - 0.5) / 0.25),
    _data("one class only", "2 or more classes", labels=np.zeros(COUNT, np.int64)),
    _data("no images", "got none", images=GREY[:0], labels=LABELS[:0]),
    Case("data", "arrays of other names", partial(_arrays, {"x": GREY, "y": LABELS}, ["audit"]), "data.images_key=x"),
    Case("data", "a table (generator train)", partial(_generator, {"images": TABLE, "labels": LABELS}), "tables"),
    Case("data", "regression (flower export)", partial(_exported, {"images": GREY, "labels": TABLE[:, 0]}), "regress"),
    Case("data", "a CSV file", partial(_file, "data.csv", b"age,income\n3,4\n"), f"{OUTSIDE}tables"),
    Case("data", "a Parquet file", partial(_file, "data.parquet", b"PAR1" + bytes(90)), f"{OUTSIDE}tables"),
    Case("data", "a JSON Lines file of text", partial(_file, "data.jsonl", b'{"text": "a"}\n'), f"{OUTSIDE}"),
)
SMALL: tuple[int, int] = (8, 8)
FOLDERS = (
    Case("folder", "empty", partial(_pictures, {}), "expected image files in class folders"),
    Case("folder", "one class", partial(_pictures, {f"cat/{n}.png": SMALL for n in range(5)}), "2 or more classes"),
    Case("folder", "loose images", partial(_pictures, {f"{n}.png": SMALL for n in range(5)}), "class folders"),
    Case("folder", "tables", partial(_pictures, {"a/x.csv": b"1,2", "b/y.csv": b"3"}), f"{OUTSIDE}tables"),
    Case("folder", "texts", partial(_pictures, {"pos/1.txt": b"good", "neg/1.txt": b"bad"}), f"{OUTSIDE}"),
    Case("folder", "sounds", partial(_pictures, {"a/1.wav": b"RIFF", "b/1.wav": b"RIFF"}), f"{OUTSIDE}"),
    Case(
        "folder",
        "images and masks",
        partial(_pictures, {f"{part}/{n}.png": SMALL for part in ("images", "masks") for n in range(3)}),
        f"{OUTSIDE}segmentation",
    ),
    Case(
        "folder",
        "a damaged picture",
        partial(_pictures, {"a/1.png": SMALL, "a/2.png": b"not a picture", "b/1.png": SMALL, "b/2.png": SMALL}),
        "a/2.png: expected a readable image",
    ),
    Case(
        "folder",
        "pictures too small for the network",
        lambda folder: [
            *_pictures({f"{c}/{n}.png": SMALL for c in "ab" for n in range(30)}, folder),
            "--set",
            "data.size=8",
            "--set",
            "model.kind=vgg16",
        ],
        "larger images",
    ),
    Case(
        "folder",
        "not there",
        partial(_setting, ["audit", "--set", "data.kind=image_folder", "--set", "data.path=x"]),
        "found nothing",
    ),
    Case(
        "folder",
        "CIFAR-10 without a test part",
        partial(_cifar, ["data_batch_1", "data_batch_2"]),
        "4 of 6 files are missing: data_batch_3",
    ),
    Case("folder", "CIFAR-10 without training parts", partial(_cifar, ["test_batch"]), "5 of 6 files are missing"),
    Case("folder", "CIFAR-10, an empty folder", partial(_cifar, []), "all 6 files are missing"),
)

MODELS = (
    Case("model", "one output", partial(_network, "one_output"), f"{OUTSIDE}regression"),
    Case("model", "one output without a column", partial(_network, "flat_output"), f"{OUTSIDE}regression"),
    Case("model", "one output (train)", partial(_network, "one_output", command="train"), f"{OUTSIDE}regression"),
    Case("model", "five outputs for four classes", partial(_network, "five_outputs"), "4 outputs, got 5"),
    Case("model", "a map of classes", partial(_network, "masks"), f"{OUTSIDE}segmentation"),
    Case("model", "a map of classes in a dict", partial(_network, "named_masks"), f"{OUTSIDE}segmentation"),
    Case("model", "boxes", partial(_network, "boxes"), f"{OUTSIDE}detection"),
    Case("model", "boxes (tradeoff)", partial(_network, "boxes", command="tradeoff"), f"{OUTSIDE}detection"),
    Case("model", "logits in a dict", partial(_network, "logits_in_a_dict"), "return only the logits"),
    Case("model", "two heads", partial(_network, "two_heads"), "return only the logits"),
    Case("model", "outputs for each step", partial(_network, "sequence"), f"{OUTSIDE}sequences"),
    Case("model", "an embedding of token ids", partial(_network, "words"), f"{OUTSIDE}tokens"),
    Case("model", "columns of a table", partial(_network, "columns"), "expected a model that takes images of 1x8x8"),
    Case("model", "a lazy layer that does not fit", partial(_network, "lazy_too_large"), "images of 1x8x8"),
    Case("model", "weights as TorchScript", partial(_weights, _script), "TorchScript"),
    Case("model", "weights as a whole module", partial(_weights, torch.save), "state_dict()"),
    Case("model", "a file as a network", partial(_setting, ["audit", "--set", "model.kind=model.pt"]), "model.init"),
)

SETTINGS = (
    Case("setting", "batch size 0", partial(_setting, ["audit", "--set", "local.batch_size=0"]), ">= 1, got 0"),
    Case("setting", "batch size 0 (train)", partial(_setting, ["train", "--set", "local.batch_size=0"]), ">= 1, got 0"),
    Case("setting", "a mean alone", partial(_setting, ["audit", "--set", "model.mean=[0.5]"]), "give a std too"),
    Case(
        "setting",
        "a mean of two channels",
        partial(_setting, ["audit", "--set", "model.mean=[0.5,0.5]", "--set", "model.std=[0.5,0.5]"]),
        "one number per channel",
    ),
    Case(
        "setting",
        "a std of 0",
        partial(_setting, ["audit", "--set", "model.mean=[0.5]", "--set", "model.std=[0.0]"]),
        "std > 0, got 0",
    ),
    Case("setting", "another loss", partial(_setting, ["train", "--set", "local.loss=mse"]), "cross-entropy"),
    Case("setting", "another task", partial(_setting, ["audit", "--set", "data.task=regression"]), OUTSIDE),
)

INSPECT = (
    Case("inspect", "batch size 0", partial(_inspected, ["--batch-size", "0"]), ">= 1, got 0"),
    Case("inspect", "a mean alone", partial(_inspected, ["--mean", "0.5"]), "give a std too"),
    Case(
        "inspect",
        "a mean of three for grey",
        partial(_inspected, ["--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5"]),
        "1 number",
    ),
    Case("inspect", "a std of 0", partial(_inspected, ["--mean", "0.5", "--std", "0"]), "std > 0, got 0"),
    Case("inspect", "channels last", partial(_inspected, ["--shape", "8,8,1"]), "1,8,8"),
    Case("inspect", "four channels", partial(_inspected, ["--shape", "4,8,8"]), "1 or 3 channels, got 4"),
    Case("inspect", "a row of a table", partial(_inspected, ["--shape", "64"]), f"{OUTSIDE}tables"),
    Case("inspect", "labels that are no classes", partial(_inspected, ["--labels", "0.5"]), f"{OUTSIDE}regression"),
    Case(
        "inspect",
        "several classes each",
        partial(_inspected, ["--labels", "0,1,1,0", "--batch-size", "1"]),
        "one class for each example",
    ),
    Case("inspect", "one output", partial(_inspected, [], function="one_output", rows=1), f"{OUTSIDE}regression"),
    Case(
        "inspect",
        "a map of classes",
        partial(
            _inspected_network,
            "masks",
            {"0.weight": torch.randn(2, 1, 1, 1), "0.bias": torch.zeros(2)},
            words=TWO,
        ),
        f"{OUTSIDE}segmentation",
    ),
    Case(
        "inspect",
        "token ids",
        partial(
            _inspected_network,
            "words",
            {"1.weight": torch.randn(50, 4), "3.weight": torch.randn(4, 256), "3.bias": torch.zeros(4)},
        ),
        f"{OUTSIDE}tokens",
    ),
    Case("inspect", "a file of TorchScript", partial(_inspected_file, _script), "TorchScript"),
    Case("inspect", "a file of a whole module", partial(_inspected_file, torch.save), "state_dict()"),
    Case("inspect", "a file as a network", partial(_inspected, ["--model", "before.pt"]), "--before"),
    Case("inspect", "true images of another size", partial(_truth, {"1.png": (9, 9)}), "expected 1x8x8"),
    Case("inspect", "no true images", partial(_truth, {}), "expected pictures"),
)


def _place(name: str, content: bytes | None, words: Words, folder: Path) -> Words:
    """A file of this content, or a folder, beside a command."""
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    return words


def _npy(folder: Path) -> Words:
    np.save(folder / "data.npy", GREY)
    return ["audit", "--set", "data.kind=arrays", "--set", "data.path=data.npy", *DRY]


def _ragged(folder: Path) -> Words:
    boxes = np.array([np.zeros((n % 3 + 1, 4)) for n in range(COUNT)], dtype=object)
    return _arrays({"images": GREY, "labels": boxes}, ["audit"], folder)


IN_FOLDER = ("audit", "--set", "data.kind=image_folder", "--set", "data.path=data.csv", *DRY)
IN_ARRAYS = ("audit", "--set", "data.kind=arrays", "--set", "data.path=pictures", *DRY)
PLACES = (
    Case("place", "a table as a folder of images", partial(_place, "data.csv", b"1,2", IN_FOLDER), f"{OUTSIDE}tables"),
    Case("place", "a folder as arrays", partial(_place, "pictures", None, IN_ARRAYS), "data.kind=image_folder"),
    Case("place", "one array as arrays", _npy, "np.savez"),
    Case("place", "boxes as objects", _ragged, "objects"),
    Case("place", "TIFF images", partial(_pictures, {"a/1.tif": b"II*", "b/1.tif": b"II*"}), "convert them to PNG"),
    Case(
        "place", "a table as a config", partial(_place, "data.csv", b"a,b\n1,2\n", ["audit", "data.csv", *DRY]), "TOML"
    ),
    Case("place", "weights as a config", partial(_place, "m.pt", b"PK\3\4\xff", ["audit", "m.pt", *DRY]), "TOML"),
    Case("place", "a folder as a config", partial(_place, "images", None, ["train", "images", *DRY]), "TOML"),
    Case("place", "an ONNX file to inspect", partial(_inspected, ["--before", "model.onnx"]), "ending in .pt"),
    Case("place", "a shape with an x", partial(_inspected, ["--shape", "1x8x8"]), "separated by commas"),
    Case("place", "labels by name", partial(_inspected, ["--labels", "cat"]), "numbers separated by commas"),
    Case("model", "a second output in training", partial(_network, "helped_in_training"), "return only the logits"),
    Case("model", "targets in training", partial(_network, "losses_in_training"), "in training mode"),
    Case("model", "a transformer by name", partial(_setting, ["audit", "--set", "model.kind=bert"]), "unknown kind"),
    Case("data", "a text corpus by name", partial(_setting, ["audit", "--set", "data.kind=imdb"]), "unknown kind"),
)

CASES: tuple[Case, ...] = (*DATA, *FOLDERS, *MODELS, *SETTINGS, *INSPECT, *PLACES)
FORBIDDEN = ("Traceback", "weights_only", "ImageSize(", "torch.Size", "frozenset(", "array(", "None")
"""No line has these: they are no plain words, or bad advice."""


def said(case: Case, folder: Path) -> tuple[int, str]:
    """The exit code of a case's command in this empty folder, and what it prints on standard error."""
    sys.argv = ["leaktight", *case.make(folder)]
    errors = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as ended:
        return int(ended.code or 0), errors.getvalue()
    except Exception as error:
        return 1, f"Traceback: {type(error).__name__}: {error}"
    finally:
        sys.modules.pop(MODULE, None)
    return 0, errors.getvalue()


def fault(case: Case, code: int, errors: str) -> str:
    """What is wrong with the answer to a bad input; empty if it is one clear line with exit code 2."""
    lines = errors.strip().splitlines()
    if "Traceback" in errors:
        return "traceback"
    if code not in case.codes:
        return f"exit code {code}"
    if len(lines) != 1 or not lines[0].startswith("leaktight: "):
        return f"{len(lines)} lines"
    if case.names not in lines[0] or any(word in lines[0] for word in FORBIDDEN):
        return "unclear"
    return ""


if __name__ == "__main__":
    found: Counter[str] = Counter()
    for each in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["LEAKTIGHT_DATA"] = f"{scratch}/data"
            answer = said(each, Path(scratch))
        found[word := fault(each, *answer) or "clear"] += 1
        print(f"[{word}] {each.id}: {answer[1].strip()[-500:]}", flush=True)  # noqa: T201
    print(dict(found), len(CASES))  # noqa: T201
