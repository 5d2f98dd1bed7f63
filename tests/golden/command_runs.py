"""The commands as a user gives them, and the numbers in the files that they write; no times, paths or sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from PIL import Image
from tests.golden.doors import (
    SMALL,
    LocalTraining,
    MadeRun,
    buffers_of,
    build_model,
    command,
    made,
    observe,
    parameters_of,
    replayed,
)
from tests.golden.federation_runs import FEDERATION

Parts = Mapping[str, Any]
Run = Callable[[], Parts]

NOT_NUMBERS = {
    "sha256",  # of a line, times included
    *("schema_version", "run", "command", "images", "metrics"),  # versions, paths, which way metrics leak
    *("because", "advice", "detail", "raised_if", "warnings", "error", "assumed"),  # sentences
    "attack_settings",  # how an attack is put together, which is to change
}


def numbers(value: Any) -> Any:
    """A document without what may change from one run, or from one wording, to the next."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if key not in NOT_NUMBERS and "seconds" not in key}
        return {key: numbers(item) for key, item in kept.items()}
    return [numbers(item) for item in value] if isinstance(value, list) else value


def in_folder(work: Callable[[Path], Parts]) -> Parts:
    with TemporaryDirectory() as folder:
        return work(Path(folder))


def lines_of(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: str(line["id"]))


def pictures_of(run: Path) -> Parts:
    """The pixels of every picture of a run."""
    return {
        str(file.relative_to(run)): torch.tensor(list(Image.open(file).tobytes()), dtype=torch.uint8)
        for file in sorted((run / "images").glob("**/*.png"))
    }


def results(run: Path) -> Parts:
    summary = json.loads((run / "summary.json").read_text())
    lines = [numbers(line) for line in lines_of(run)]
    return {
        "scores": {line["id"]: [line["status"], line["scores"], line["label_accuracy"]] for line in lines},
        "losses": {line["id"]: [line["loss"], line["first_loss"]] for line in lines},
        "trials": lines,
        "pictures": pictures_of(run),
        "scenario": {name: re.findall(r"\d+\.?\d*", str(fact)) for name, fact in summary["scenario"].items()},
        **{part: numbers(summary[part]) for part in ("cells", "verdicts", "flags", "ledger") if part in summary},
    }


def audit(folder: Path) -> Parts:
    (folder / "small.toml").write_text(f'secret_seed = "{"ab" * 32}"\n{SMALL}')
    command(folder, "audit", "small.toml", "--trials", "4", "--workers", "1", "--json", "--out", "run")
    return results(folder / "run")


def tradeoff(folder: Path) -> Parts:
    (folder / "small.toml").write_text(f'secret_seed = "{"ab" * 32}"\n{SMALL}')
    options = ("--no-adaptive", "--trials", "1", "--attack", "csdlg", "--defense", "noise")
    command(folder, "tradeoff", "small.toml", "--workers", "1", "--json", "--out", "run", *options)
    table = json.loads((folder / "run" / "summary.json").read_text())["tradeoff"]
    kept = ("defense", "settings", "leak", "accuracy")  # the rest depends on how long it took
    return {
        **{part: [row[part] for row in table["rows"]] for part in kept},
        "recommendation": table["recommendation"]["defense"],
        **results(folder / "run"),
    }


def train(folder: Path) -> Parts:
    (folder / "train.toml").write_text(FEDERATION)
    printed = command(
        folder, "train", "train.toml", "--workers", "1", "--json", "--out", "run", "--defense", "adadefense"
    )
    summary = json.loads(printed)
    return {
        "rounds": numbers(summary["rounds"]),
        "final": summary["final"],
        "weights": safetensors.torch.load_file(folder / "run" / "model.safetensors"),
    }


def capture(folder: Path) -> None:
    """What a stranger holds: a network before and after one step on one picture, and the picture."""
    data = made("datasets", "digits", size=8).load(Path())
    source = made("models", "lenet_zhu")
    model = build_model(source, data.inputs, 10, init="wide", rng=replayed(3))
    seen = observe(model, data.train.batch(torch.tensor([5])), 10, local=LocalTraining(batch_size=1, learning_rate=0.1))
    before = {**parameters_of(model), **buffers_of(model)}
    after = {name: tensor + seen.update.tensors.get(name, 0) for name, tensor in before.items()}
    for name, tensors in (("before", before), ("after", after)):
        safetensors.torch.save_file(
            {key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors"
        )
    Image.fromarray(data.train.inputs[5, 0].numpy()).save(folder / "truth.png")


def inspect(folder: Path) -> Parts:
    capture(folder)
    files = ("--before", "before.safetensors", "--after", "after.safetensors", "--truth", "truth.png")
    facts = ("--model", "lenet_zhu", "--shape", "1,8,8", "--local", "learning_rate=0.1", "--set", "attack.iterations=1")
    command(folder, "inspect", *files, *facts, "--attack", "csdlg", "--workers", "1", "--json", "--out", "run")
    return results(folder / "run")


def generator(folder: Path) -> Parts:
    size = ("--data", "digits", "--size", "8", "--latent", "4", "--width", "4")
    command(folder, "generator", "train", *size, "--epochs", "1", "--seed", "3", "--out", "generator.safetensors")
    return {"weights": safetensors.torch.load_file(folder / "generator.safetensors")}


def report(folder: Path) -> Parts:
    """The tables of a made run: their text, and their numbers alone, which no wording changes."""
    MadeRun(folder / "audit-001").add_all().finish(tradeoff=True, over_time=True)
    found: dict[str, Any] = {}
    for form in ("md", "csv", "latex"):
        command(folder, "report", "audit-001", "--format", form, "--out", f"table.{form}")
        text = (folder / f"table.{form}").read_text()
        found |= {form: text, f"{form}-numbers": re.findall(r"-?\d+\.\d+", text)}
    return found


COMMANDS: Mapping[str, Run] = {
    work.__name__: partial(in_folder, work) for work in (audit, tradeoff, train, inspect, generator, report)
}
