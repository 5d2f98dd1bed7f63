"""Builds an inspection from what a user states about a captured update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from leaktight.adaptive.auto import Auto
from leaktight.adaptive.knowing import Case
from leaktight.adaptive.table import unable
from leaktight.attacks.controls import MeanImage, PriorOnly
from leaktight.audits.plan import AttackEntry, Entry, named
from leaktight.config.audit import CONTROLS, adapted, is_small, must_read
from leaktight.config.capture import CaptureRequest, facts_of, record_of
from leaktight.config.catalogue import ATTACKS, DATASETS, DEFENSES
from leaktight.config.names import ENTRIES
from leaktight.config.settings import model_source
from leaktight.config.tables import as_list, overridden
from leaktight.config.toml import build, checked, choose, choose_all, kind_of, settings_of
from leaktight.core.devices import chosen_device
from leaktight.core.errors import ConfigError, UsageError, suggestion
from leaktight.core.inputs import Images
from leaktight.core.protocols import Defense
from leaktight.core.scope import checked_shape
from leaktight.core.text import as_written, printable
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import data_root
from leaktight.defenses.stack import Stack
from leaktight.inspections.captured import Captured, CaptureSettings, ChangeKind, count_examples, load_capture
from leaktight.inspections.files import Tensors, TrueExamples, read_decoys, read_truth, tensor_file
from leaktight.inspections.inspection import Inspection
from leaktight.models.surgery import has_batch_norm

WHERE = "inspect"
TABLES = ("seed", "device", "model", "local", "attack", "defense")


@dataclass(frozen=True)
class Prepared:
    """An inspection that is ready to run. record: the resolved settings as TOML. facts: for readers."""

    inspection: Inspection
    record: str
    facts: dict[str, Any]


def prepare(request: CaptureRequest) -> Prepared:
    """Read and check all files and settings of the request; no attack runs yet."""
    kind = _kind(request)
    tables = _tables(request)
    inputs = Images(*checked_shape(request.shape))
    truth = None if request.truth is None else read_truth(request.truth, inputs)
    count = count_examples(request.batch_size, request.labels, truth)
    number = 1 if count is None else count
    source = model_source(tables["model"], WHERE)
    try:
        settings = CaptureSettings(
            model=source,
            inputs=inputs,
            num_classes=request.classes,
            mean=tuple(request.mean),
            std=tuple(request.std),
            mode=request.mode or "train",
            num_examples=number,
            labels=None if request.labels is None else tuple(request.labels),
            local=_local(tables["local"], number, kind),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    before, change = tensor_file(request.before, "before"), tensor_file(_change(request), kind)
    defense = _defense(tables)
    captured = load_capture(settings, before, change, kind, None if defense is None else defense.value)
    _check_truth_labels(truth, captured)
    attacks = _entries(tables, captured, controls=truth is not None)
    knowing, helpless = _knowing(attacks, captured, defense)
    inspection = Inspection(
        captured=captured,
        attacks=[*attacks, *knowing],
        truth=truth,
        decoys=_decoys(request, inputs),
        defense=defense,
        helpless=helpless,
        assumed=_assumed(request, count, captured),
        source=change.path.name,
        seed=checked(int, tables["seed"], WHERE, "seed"),
        data_root=data_root(None),
        device=chosen_device(checked(str, tables["device"], WHERE, "device")),
    )
    record = tomli_w.dumps(record_of(request, inspection, before, change, kind))
    return Prepared(inspection, record, facts_of(request, inspection, before, change, kind))


def _kind(request: CaptureRequest) -> ChangeKind:
    if (request.after is None) == (request.update is None):
        got = "both" if request.after is not None else "neither"
        raise UsageError(f"expected either --after, the model after training, or --update, its change; got {got}")
    if request.update is None:
        if request.kind is not None:
            raise UsageError("--kind describes --update; leave it out with --after")
        return "after"
    if request.kind is None:
        raise UsageError("expected --kind delta (after minus before) or --kind gradient with --update, got none")
    return request.kind


def _change(request: CaptureRequest) -> Tensors:
    change = request.update if request.after is None else request.after
    return {} if change is None else change


def _tables(request: CaptureRequest) -> dict[str, object]:
    model = {"kind": request.model} if isinstance(request.model, str) else request.model
    base = {"seed": 0, "device": request.device, "model": model, "local": request.local}
    tables = overridden(
        base, request.settings, {"attack": as_list(request.attacks), "defense": as_list(request.defenses)}
    )
    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{WHERE}: unknown table {name!r}; {suggestion(name, TABLES)}")
    return tables


def _local(table: object, count: int, kind: ChangeKind) -> LocalTraining | None:
    """The local training, by default with all examples in one batch; None if nothing was stated."""
    if isinstance(table, LocalTraining):
        return table
    if not table:
        return None
    if not isinstance(table, Mapping):
        raise UsageError(f"expected local training as a table, got {as_written(table)}")
    if kind == "gradient":
        raise UsageError("a gradient of one batch has no local training; leave --local out, or use --kind delta")
    if "learning_rate" not in table:
        raise UsageError("expected --local learning_rate=..., got none; leave --local out if the rate is unknown")
    return build(LocalTraining, {"batch_size": count, **table}, WHERE, "local")


def _check_truth_labels(truth: TrueExamples | None, captured: Captured) -> None:
    labels = None if truth is None else truth.labels
    if labels is not None and not bool(((labels >= 0) & (labels < captured.seen.num_classes)).all()):
        got = printable(labels.tolist(), 100)
        raise UsageError(
            f"expected true labels from 0 to {captured.seen.num_classes - 1}, got {got}; correct the labels of --truth"
        )


def _decoys(request: CaptureRequest, inputs: Images) -> TrueExamples | None:
    """The decoys of a file or folder, or the training images of a data set of the catalogue."""
    if request.decoys is None:
        return None
    if request.truth is None:
        raise UsageError("decoys are compared with the true images; give --truth, too, or leave --decoys out")
    if (
        not isinstance(request.decoys, str)
        or request.decoys not in ENTRIES["datasets"]
        or Path(request.decoys).exists()
    ):
        return read_decoys(request.decoys, inputs)
    train = choose(DATASETS, request.decoys, WHERE, "data").load(data_root(None)).train
    if train.example != inputs:
        raise UsageError(f"expected decoys of {inputs} as in --shape, got {train.example} in {request.decoys}")
    return TrueExamples(train.batch().inputs, train.targets)


def _defense(tables: Mapping[str, Any]) -> Entry[Defense] | None:
    """What the client is known to have done to the update; None if nothing is stated. Several are stacked."""
    parts = choose_all(DEFENSES, tables["defense"], WHERE, "defense") if "defense" in tables else ()
    if not parts:
        return None
    defense = parts[0] if len(parts) == 1 else Stack(parts=parts)
    return Entry(" + ".join(kind_of(part) or type(part).__name__ for part in parts), settings_of(defense), defense)


def _knowing(
    entries: Sequence[AttackEntry], captured: Captured, defense: Entry[Defense] | None
) -> tuple[list[AttackEntry], str | None]:
    """The attacks adapted to the defense, and why there are none."""
    if defense is None:
        return [], None
    settings = captured.settings
    case = Case(
        model=captured.seen.model,
        num_examples=settings.num_examples,
        num_steps=captured.num_steps or 1,
        mode=settings.mode,
    )
    reason = unable(defense.value, case)
    knowing = adapted([entry for entry in entries if entry.role == "attack"], defense) if reason is None else []
    return knowing, reason or (None if knowing else "none of these attacks can be adapted to it")


def _assumed(request: CaptureRequest, count: int | None, captured: Captured) -> list[str]:
    notes = []
    if count is None:
        notes.append("one example behind the update (no --batch-size)")
    if request.mode is None and has_batch_norm(captured.bare):
        notes.append("batch normalisation in training mode (no --mode)")
    if not request.mean:
        notes.append("the network receives images in [0, 1], which it may normalise itself (no --mean)")
    return notes


def _entries(tables: Mapping[str, Any], captured: Captured, *, controls: bool) -> list[AttackEntry]:
    given = choose_all(ATTACKS, tables["attack"], WHERE, "attack") if "attack" in tables else ()
    attacks = [each.fitted(captured.seen) for each in given]
    if all(isinstance(each, CONTROLS) for each in attacks):
        attacks = [Auto().fitted(captured.seen), *attacks]
    if controls and not any(isinstance(each, CONTROLS) for each in attacks):
        attacks += [PriorOnly().fitted(captured.seen), MeanImage()]
    attacks = [each.pinned(onednn=not is_small(captured.bare)) for each in attacks]
    names = named([kind_of(each) or type(each).__name__ for each in attacks], [settings_of(each) for each in attacks])
    return [
        AttackEntry(
            name,
            settings_of(each),
            each,
            "control" if isinstance(each, CONTROLS) else "attack",
            reads_labels=captured.seen.labels is None and must_read(each),
        )
        for name, each in zip(names, attacks, strict=True)
    ]
