"""Face re-identification (Ren's thesis, Tables 3.14 and 3.15): who a recogniser takes a reconstructed face for."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaktight.api import audit
from leaktight.audits.experiment import TrialRunner, truth_of
from leaktight.audits.judge.cells import THRESHOLDS
from leaktight.audits.trial import judge
from leaktight.config.catalogue import MODELS
from leaktight.config.recipes import PREFIX
from leaktight.core.keys import KEY_BYTES
from leaktight.core.rng import Rng
from leaktight.data.dataset import Dataset
from leaktight.models.initialise import build_model

_RECIPE = Path(f"{PREFIX}grnn-table-3-15")
_OWN = "recogniser."
_METHODS = {"dlg": "DLG", "grnn": "GRNN"}
_TOP = (1, 3, 5)

Values = dict[str, dict[str, dict[str, float]]]
"""By row and column, the values by victim."""


@dataclass(frozen=True, kw_only=True)
class Recogniser:
    """A classifier of faces, trained on the examples of all clients.

    kind: the network. name: in the rows of the table. epochs, batch_size, learning_rate: of its training by Adam.
    batches: batch sizes of the attacked updates.
    """

    kind: str = "resnet18"
    name: str = "Res18"
    epochs: int = 30
    batch_size: int = 32
    learning_rate: float = 1e-3
    batches: tuple[int, ...] = (1, 4, 8, 16)

    @classmethod
    def of(cls, settings: Sequence[str]) -> Recogniser:
        """From settings such as "recogniser.epochs=5" and "recogniser.batches=1,4"."""
        said = dict(each.removeprefix(_OWN).partition("=")[::2] for each in settings)
        batches = tuple(int(each) for each in said.get("batches", "1,4,8,16").split(","))
        return cls(kind=said.get("kind", cls.kind), epochs=int(said.get("epochs", cls.epochs)), batches=batches)

    def train(self, dataset: Dataset) -> nn.Module:
        model = build_model(MODELS[self.kind](), dataset.inputs, dataset.num_classes, rng=Rng(0).child("recogniser"))
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        generator = Rng(0).child("order").public()
        for _ in range(self.epochs):
            for places in torch.randperm(len(dataset.train), generator=generator).split(self.batch_size):
                batch = dataset.train.batch(places)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model.train()(batch.inputs), batch.targets).backward()
                optimizer.step()
        return model.eval()


class Face(NamedTuple):
    """A reconstructed example. recovered: whether its SSIM or PSNR is that of a reconstruction."""

    victim: str
    method: str
    guess: Tensor
    truth: Tensor
    person: int
    recovered: bool


def reidentified(settings: Sequence[str]) -> Values:
    """Attack faces, and have a recogniser name the people in the guesses.

    settings: of the audit, and "recogniser.kind", "recogniser.epochs" and "recogniser.batches". Each victim's value is
    the mean over its faces: of the recovered ones, as in the thesis, and of all of them.
    """
    recogniser = Recogniser.of([each for each in settings if each.startswith(_OWN)])
    audited = [each for each in settings if not each.startswith(_OWN)]
    dataset = _runner(audited, 1).experiment.federation.dataset
    network = recogniser.train(dataset)
    accuracy = 100 * _accuracy(network, dataset)
    values: Values = defaultdict(lambda: defaultdict(dict))
    for size in recogniser.batches:
        faces = list(_attacked(_runner(audited, size), methods=("dlg", "grnn") if size == 1 else ("grnn",)))
        for method, victim in dict.fromkeys((face.method, face.victim) for face in faces):
            own = [face for face in faces if (face.method, face.victim) == (method, victim)]
            row = values[f"{method}, {recogniser.name}, batch {size}"]
            row["Train Acc"][victim] = accuracy
            for column, value in _named(network, own).items():
                row[column][victim] = value
            if method == "GRNN" and size == 1:
                _one_face(values, network, own[0])
    return {row: dict(columns) for row, columns in values.items()}


def _runner(settings: Sequence[str], size: int) -> TrialRunner:
    sized = (*settings, f"local.samples={size}", f"local.batch_size={size}")
    planned = audit.plan("audit", _RECIPE, adaptive=False, defenses_named=True, settings=sized)
    return TrialRunner(planned.experiment.keyed(secrets.token_bytes(KEY_BYTES)))


def _attacked(runner: TrialRunner, methods: Sequence[str]) -> Iterator[Face]:
    """The faces of all victims as the attacks reconstruct them."""
    for spec in runner.experiment.trials:
        if spec.attack.name not in methods:
            continue
        scene = runner.scene(spec)
        played = runner.play(spec, scene)
        (found,) = runner.guesses(spec, played.given)
        truth = truth_of(played.counted, [scene.victim])
        judged = judge(found.guess, truth, runner.metrics)
        scores = {metric: judged.scores[metric] or () for metric in THRESHOLDS}
        for place, guess in enumerate(judged.aligned):
            recovered = any((scores[metric][place] or 0) >= least for metric, (least, _) in THRESHOLDS.items())
            person = int(truth.targets[place])
            name = _METHODS[spec.attack.name]
            yield Face(f"victim {spec.trial}", name, guess, truth.inputs[place], person, recovered)


def _named(network: nn.Module, faces: Sequence[Face]) -> dict[str, float]:
    """The columns of one victim: percent of its faces whose person is among the first names."""
    chances = _chances(network, torch.stack([face.guess for face in faces]))
    columns: dict[str, float] = {}
    for first in _TOP:
        right = [_within(row, face.person, first) for row, face in zip(chances, faces, strict=True)]
        recovered = [hit for hit, face in zip(right, faces, strict=True) if face.recovered]
        columns[f"Top-{first}, all faces"] = 100 * fmean(right)
        if recovered:
            columns[f"Top-{first}"] = 100 * fmean(recovered)
    return {**columns, "share recovered": fmean(face.recovered for face in faces)}


def _one_face(values: Values, network: nn.Module, face: Face) -> None:
    """The rows of Table 3.14: what the recogniser says of a true face and of its reconstruction."""
    for row, image in (("true image", face.truth), ("generated image", face.guess)):
        (chances,) = _chances(network, image.unsqueeze(0))
        values[row]["first label right, %"][face.victim] = 100 * float(_within(chances, face.person, 1))
        values[row]["right label among three, %"][face.victim] = 100 * float(_within(chances, face.person, 3))
        values[row]["confidence of the first, %"][face.victim] = 100 * float(chances.max())


def _within(chances: Tensor, person: int, first: int) -> bool:
    return person in chances.topk(min(first, len(chances))).indices.tolist()


@torch.no_grad()
def _chances(network: nn.Module, images: Tensor) -> Tensor:
    """The probability of each person (N, C), of images in [0, 1]."""
    return torch.as_tensor(network(images.clamp(0, 1).float())).softmax(1)


@torch.no_grad()
def _accuracy(network: nn.Module, dataset: Dataset) -> float:
    hits = 0
    for places in torch.arange(len(dataset.train)).split(64):
        batch = dataset.train.batch(places)
        hits += int((network(batch.inputs).argmax(1) == batch.targets).sum())
    return hits / len(dataset.train)
