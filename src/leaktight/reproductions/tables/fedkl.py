"""FedKL: accuracies with right and wrong keys (Table 5.3), and attackers who are told keys or locks (Table 5.7)."""

from __future__ import annotations

import copy
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from leaktight.api import audit
from leaktight.audits.experiment import TrialRunner, truth_of
from leaktight.audits.trial import judge
from leaktight.config.recipes import PREFIX
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.errors import ConfigError
from leaktight.core.keys import KEY_BYTES
from leaktight.core.protocols import ClientFacts
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.types import Batch, Broadcast, Observation, Params, State
from leaktight.defenses.fedkl import FedKl, LockContent, score_keys
from leaktight.engines import inprocess
from leaktight.fl.client import Client
from leaktight.fl.local import loss_and_gradient
from leaktight.models.keylock import LOCK, KeyLock
from leaktight.models.surgery import mode_of
from leaktight.reproductions.tables.own import Values, divided, workers

_CONTENTS: Mapping[LockContent, str] = {
    "random": "random",
    "random_key": "fresh key in the trained lock",
    "wrong_key": "another client's key in the trained lock",
    "zero": "scale and shift 0",
}
"""The rows that are means over clients and draws."""
_TOLD = ("neither", "key", "lock", "both")


@dataclass(frozen=True, kw_only=True)
class _ThesisLocks(FedKl):
    """FedKL with other first locks and keys.

    from_server: all locks begin with the same weights, those that the server sent, as in the thesis. centred: keys are
    drawn from U(-1/2, 1/2), so that two keys have nothing in common.
    """

    from_server: bool = True
    centred: bool = False

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        model, state = super().start(model, facts, rng=rng)
        locks = [each for each in model.modules() if isinstance(each, KeyLock)]
        if self.from_server:
            with global_seed(Rng(0).child("lock of the server")):
                for lock in locks:
                    lock.scale.reset_parameters()
                    lock.shift.reset_parameters()
        if self.centred:
            for lock in locks:
                lock.key -= 0.5
        return model, state


def keys(settings: Sequence[str]) -> Values:
    """Table 5.3: train with FedKL, and score the last model with right and wrong keys; percent.

    own.model, own.column: names of rows and columns. own.seeds: trainings. own.draws: random keys of each client.
    own.test: the most test examples of a score. own.lock: "server", all locks begin with the same weights, or "client".
    own.key: "uniform" or "centred". own.workers: processes.
    """
    own, rest = divided(settings)
    config = load_config(Path(f"{PREFIX}fedkl-table-5-3"), rest)
    if not isinstance(config.defense, FedKl):
        raise ConfigError("expected the defense fedkl, got another; set it")
    given = config.defense
    defense = _ThesisLocks(
        blocks=given.blocks,
        key_length=given.key_length,
        variant=given.variant,
        from_server=own.get("lock", "server") == "server",
        centred=own.get("key", "uniform") == "centred",
    )
    model, column = own["model"], own["column"]
    values: Values = defaultdict(lambda: defaultdict(dict))
    for seed in range(int(own.get("seeds", "3"))):
        chosen = replace(config, seed=seed, defenses=(defense,))
        found, share = _scored(chosen, own)
        for row, accuracy in found.items():
            columns = values[f"{model}, {row}"]
            columns[column][f"seed {seed}"] = accuracy
            columns[f"{column} gap"][f"seed {seed}"] = accuracy - found["random"]
        values[f"{model}, average"][f"{column} lock, %"][f"seed {seed}"] = share
    return {row: dict(columns) for row, columns in values.items()}


def _scored(config: Config, said: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """The accuracy of each row, and the share of the parameters that is in the lock; both in percent."""
    dataset, partition = load_data(config)
    most = int(said.get("test", len(dataset.test)))
    places = torch.linspace(0, len(dataset.test) - 1, min(most, len(dataset.test))).long()
    federation = build_federation(config, replace(dataset, test=dataset.test.take(places)), partition)
    final = inprocess.run(federation, workers=workers(said), score=False)
    sent = Broadcast(final.server.params, final.server.buffers, final.server.round)
    rng = Rng(config.seed, key=Rng.fresh().key)
    own: list[float] = []
    others: dict[LockContent, list[float]] = {content: [] for content in _CONTENTS}
    for name in sorted(federation.shares):
        client = federation.client(name)
        for draw in range(int(said.get("draws", "4"))):
            scores = score_keys(client, sent, final.clients, rng=rng.child(name, draw))
            for content, accuracies in others.items():
                accuracies.append(100 * scores[content].accuracy)
        own.append(100 * scores["own"].accuracy)
    rows = {f"client {place}": accuracy for place, accuracy in enumerate(own)}
    means = {_CONTENTS[content]: fmean(accuracies) for content, accuracies in others.items()}
    private = sum(each.numel() for each in final.clients[sorted(federation.shares)[0]].params.values())
    public = sum(each.numel() for each in final.server.params.values())
    return {**rows, "average": fmean(own), **means}, 100 * private / (private + public)


def told(settings: Sequence[str]) -> Values:
    """Table 5.7: an attacker who is told nothing, the key, the gradient of the lock, or both.

    The first weights of the lock are known to all of them but the first, because in the thesis the server sends them.
    Rows: what is told, an attack without the key-lock module, and attackers who know the defense alone.
    own.column: the name of the columns. own.attack: the attack that is told something.
    """
    own, rest = divided(settings)
    source = Path(f"{PREFIX}fedkl-table-5-7")
    planned = audit.plan("audit", source, adaptive=True, defenses_named=True, settings=rest)
    runner = TrialRunner(planned.experiment.keyed(planned.config.key or secrets.token_bytes(KEY_BYTES)))
    values: Values = defaultdict(lambda: defaultdict(dict))
    for spec in runner.experiment.trials:
        if spec.attack.role != "attack" or (spec.attack.name != own["attack"] and not spec.attack.adaptive):
            continue
        scene = runner.scene(spec)
        played = runner.play(spec, scene)
        truth, ((seen,),) = truth_of(played.counted, [scene.victim]), played.given
        if spec.attack.adaptive:
            shown = {"neither, defense known": seen}
        elif spec.defense.name == "none":
            shown = {"no key-lock module": seen}
        else:
            shown = knowledge(seen, scene.federation.client(scene.victim), truth, rng=Rng(spec.trial))
        for row, observation in shown.items():
            (found,) = runner.guesses(spec, [[observation]])
            scores = judge(found.guess, truth, runner.metrics).scores
            for metric, name in (("ssim", "SSIM"), ("psnr", "PSNR")):
                known = [score for score in scores[metric] or () if score is not None]
                if known:
                    values[row][f"{own['column']} {name}"][f"victim {spec.trial}"] = fmean(known)
    return {row: dict(columns) for row, columns in values.items()}


def knowledge(seen: Observation, client: Client, truth: Batch, *, rng: Rng) -> dict[str, Observation]:
    """What the attacker has of one step in the first round, by what it is told.

    seen: without key and lock. truth: the examples of the step. rng: of the key that an attacker without it makes up.
    Parameters that are not in a broadcast keep the values of its network, so those of the lock are known.
    """
    trainer, own = client.trainer, client.rng.child("defense", "start")
    model, _ = trainer.defense.start(copy.deepcopy(trainer.model), client.facts, rng=own)
    sent = seen.broadcast
    params = {**sent.params, **_of_locks(parameters_of(model))}
    buffers = {**sent.buffers, **_of_locks(buffers_of(model))}
    made_up = {name: torch.rand(key.shape, generator=rng.public()).to(key) for name, key in _of_locks(buffers).items()}
    with mode_of(model, trainer.mode):
        _, gradient = loss_and_gradient(replace(trainer, model=model), params, cloned(buffers), truth)
    lock = _scaled_like(seen.update.tensors, gradient)

    def given(*, key: bool, slopes: bool) -> Observation:
        held = buffers if key else {**buffers, **made_up}
        tensors = {**seen.update.tensors, **(lock if slopes else {})}
        return replace(
            seen,
            model=model,
            broadcast=replace(sent, params=params if slopes else sent.params, buffers=held),
            update=replace(seen.update, tensors=tensors),
        )

    told_of = (seen, given(key=True, slopes=False), given(key=False, slopes=True), given(key=True, slopes=True))
    return dict(zip(_TOLD, told_of, strict=True))


def _of_locks(tensors: Params) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if LOCK in name.split(".")}


def _scaled_like(sent: Params, gradient: Params) -> dict[str, Tensor]:
    """The gradient of the locks on the scale of what was sent of the rest, which the federation may have weighted."""
    own = sum(float((gradient[name] ** 2).sum()) for name in sent)
    factor = sum(float((gradient[name] * tensor).sum()) for name, tensor in sent.items()) / own
    return {name: factor * tensor for name, tensor in _of_locks(gradient).items()}
