"""The base of adaptive attacks: the composition of an attack, changed for a known defense.

An `Adaptation` changes three things, and not the loop: the observations (noise averaged, a stand-in inverted), the
parts of the attack (objective, priors, labels), and each view of an update (weights of entries, further unknowns, a
model of what the defense does to the update of a guess). `stages.py` repeats the search with
a view that depends on the last guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor, nn

from leaktight.attacks.labels.last_layer import head_gradient
from leaktight.attacks.labels.rules import BiasCorrected, Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine, LayerCosine, Objective
from leaktight.attacks.matching.view import Around, View
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.inputs import Inputs
from leaktight.core.protocols import Attack, Defense, LabelSource, Progress, Report, RoundPlan, Step, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Mode, Observation, Params, Reconstruction, State, Update
from leaktight.models.surgery import final_linear


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an attack is going to meet, as far as it is known before.

    round: of the federation, 0 for the first. watched: the rounds of the client that the attacker sees, the attacked
    one included. clients: how many updates are in what the attacker sees; 1 if it sees the client's own.
    """

    model: nn.Module
    num_examples: int
    num_steps: int
    round: int = 0
    mode: Mode = "train"
    watched: int = 1
    clients: int = 1


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How an attack changes for a defense. Every hook is the identity by default.

    exact: whether it relies on entries that the defense left exact; it is useless if a later part of a stack blurs.
    blurs: whether its defense changes every entry.
    """

    exact: ClassVar[bool] = False
    blurs: ClassVar[bool] = False

    defense: Defense

    def unable(self, case: Case) -> str | None:
        """Why knowing the defense does not help in this case, as a phrase; None if it may help."""
        return None

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        """The changed attack, and the changed observations."""
        return attack, list(seen)

    def view(self, view: View, seen: Observation) -> View:
        """The changed view of an update. seen: the observation as `prepare` returned it."""
        return view

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        """Run the changed attack."""
        return attack.reconstruct(seen, rng=rng, progress=progress)


@dataclass(frozen=True, kw_only=True)
class Knowing(Attack):
    """An attack adapted to a defense: the composition of `attack`, changed by `adaptation`.

    Assumes: what the attack assumes, and the defense with all its settings (DEFENSE). Secrets (keys, noise, moments,
    learning rates) are unknown.
    """

    attack: Preset | Matching
    adaptation: Adaptation

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return self.attack.takes

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.attack.requires | {Knowledge.DEFENSE}

    @property
    def labels_from(self) -> LabelSource:
        return self.attack.labels_from

    @property
    def joins_rounds(self) -> bool:
        return self.attack.joins_rounds

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, attack=self.attack.pinned(onednn=onednn))

    def matching(self) -> Matching:
        """The composition before the adaptation."""
        return self.attack if isinstance(self.attack, Matching) else self.attack.matching()

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Reconstruct the examples of one update, or of several updates of the same examples."""
        require_seen(self, seen)
        for each in seen:
            require(each, Knowledge.DEFENSE)
            if each.defense != self.adaptation.defense:
                raise UsageError(
                    f"expected updates with the defense {self.adaptation.defense}, to which this attack is adapted, "
                    f"got {each.defense}; adapt the attack to that one"
                )
        attack, shown = self.adaptation.prepare(self.matching(), seen)
        attack = replace(attack, matched=Expecting(inner=attack.matched, adaptation=self.adaptation))
        return self.adaptation.solve(attack, shown, rng=rng, progress=progress)


@dataclass(frozen=True, kw_only=True)
class Expecting(Around):
    """Match as `inner` does, with the view changed by an adaptation."""

    adaptation: Adaptation

    def changed(self, view: View, seen: Observation) -> View:
        return self.adaptation.view(view, seen)


@dataclass(frozen=True)
class _Mimics(Defense):
    """Models of several defenses, applied in order; all share one state, the unknowns of the search."""

    parts: tuple[Defense, ...]

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        for part in self.parts:
            plan, state = part.on_round(plan, state, rng=rng, report=report)
        return plan, state

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        for part in self.parts:
            gradient, state = part.on_gradient(step, state, rng=rng, report=report)
            step = replace(step, gradient=gradient)
        return step.gradient, state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        for part in self.parts:
            update, state = part.on_update(update, state, rng=rng, report=report)
        return update, state


def composition_of(attack: Attack) -> Preset | Matching | None:
    """The attack, if it is a composition that matches an update and so can be adapted; else None."""
    if not isinstance(attack, Preset | Matching):
        return None
    composed = attack.composition() if isinstance(attack, Preset) else attack
    return None if composed is None or composed.objective is None else attack


def mimicking(view: View, mimic: Defense) -> View:
    """A view that applies a model of a defense to guesses, after those that it already has."""
    before = view.trainer.defense
    parts = before.parts if isinstance(before, _Mimics) else () if type(before) is Defense else (before,)
    defense = _Mimics((*parts, mimic)) if parts else mimic
    return replace(view, trainer=replace(view.trainer, defense=defense))


def weighing(view: View, weights: Params, note: str) -> View:
    """A view with its weights multiplied by these. Tensors whose weights are all zero are not matched."""
    joined = dict(view.weights)
    for name, weight in weights.items():
        if name in view.target:
            own = weight.to(view.target[name])
            joined[name] = joined[name] * own if name in joined else own
    blank = {name for name, weight in joined.items() if not bool(weight.any())}
    return replace(
        view,
        target={name: tensor for name, tensor in view.target.items() if name not in blank},
        weights={name: weight for name, weight in joined.items() if name not in blank},
        notes=(*view.notes, note),
    )


def visible(tensors: Params) -> dict[str, Tensor]:
    """1 where the tensors are not zero, else 0, by name."""
    return {name: (tensor != 0).to(tensor.dtype) for name, tensor in tensors.items()}


def without(view: View, names: Sequence[str], note: str) -> View:
    """A view that does not match these tensors."""
    target = {name: tensor for name, tensor in view.target.items() if name not in names}
    return replace(view, target=target, notes=(*view.notes, note))


def scale_free(objective: Objective | None) -> Objective | None:
    """The objective if it is scale-free, else the cosine."""
    return objective if objective is None or objective.scale_free else Cosine()


def zeros_are_the_defenses(attack: Matching) -> Matching:
    """An attack whose objective does not mistake zeros made by a defense for zeros of ReLU."""
    if isinstance(attack.objective, LayerCosine):
        return replace(attack, objective=replace(attack.objective, relu_modifier=False))
    return attack


def labels_from_bias(attack: Matching, seen: Observation) -> Matching:
    """An attack that reads labels from the last layer's bias, if it has one, instead of searching for them.

    With one example the bias gradient p - y is negative at the label only, whatever the features are.
    """
    if not isinstance(attack.labels, Joint):
        return attack
    try:
        bias = head_gradient(seen).bias
    except LeaktightError:
        return attack
    return attack if bias is None else replace(attack, labels=BiasCorrected())


def last_weight(model: nn.Module, seen: Observation) -> str:
    """The name of the weight of the last linear layer."""
    example = next(model.parameters())
    name, _ = final_linear(model, seen.inputs.blank(1, example))
    return f"{name}.weight" if name else "weight"
