"""GGL: a search over the latents of a generator, with guesses transformed like the defended update.

The strength of the transform is estimated from the update; the attacks of `leaktight.adaptive` know the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from leaktight.attacks.generative.latent import Latents
from leaktight.attacks.labels.rules import Idlg
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.view import Around, View
from leaktight.attacks.optimizers.bayesian import Bayesian
from leaktight.attacks.optimizers.derivative_free import CmaEs
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.optimizer import Optimizer
from leaktight.attacks.presets.preset import Preset
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.tensors import squared_norm
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation, State, Update
from leaktight.models.gan import GeneratorSource
from leaktight.models.source import require_choice
from leaktight.models.surgery import final_linear

Expected: TypeAlias = Literal["none", "clipping", "compression", "soteria"]


@dataclass(frozen=True, kw_only=True)
class AsSeen(Around):
    """Match as `inner` does, with the updates of guesses transformed like the observed one.

    defense: "clipping", to the norm of the observed update; "compression", in each tensor as many of the smallest
    entries become zero as are zero in the observed one; "soteria", the columns of the last linear layer that are zero
    in the observed update become zero; "none". A change after several steps is transformed as a whole.
    Reference: Li et al., Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022.
    """

    defense: Expected = "none"

    def __post_init__(self) -> None:
        require_choice("defense", self.defense, _TRANSFORMS)

    def changed(self, view: View, seen: Observation) -> View:
        return _TRANSFORMS[self.defense](view, seen)


@dataclass(frozen=True)
class _ClippedTo(Defense):
    """Clips the whole update, as a pure function of tensors."""

    norm: float
    names: tuple[str, ...]

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        squares = torch.stack([update.tensors[name].square().sum() for name in self.names]).sum()
        factor = (self.norm / (squares + torch.finfo(squares.dtype).tiny).sqrt()).clamp(max=1)
        return replace(update, tensors={name: factor * tensor for name, tensor in update.tensors.items()}), state


@dataclass(frozen=True)
class _WithZeros(Defense):
    """Compresses each tensor, as a pure function of tensors. zeros: pairs of a name and how many entries to remove."""

    zeros: tuple[tuple[str, int], ...]

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        pruned = {name: _pruned(update.tensors[name], count) for name, count in self.zeros}
        return replace(update, tensors={**update.tensors, **pruned}), state


def _pruned(tensor: Tensor, count: int) -> Tensor:
    """The tensor with its `count` smallest entries, and those that equal the largest of them, set to zero."""
    sizes = tensor.detach().abs()
    bound = sizes.flatten().sort().values[count - 1]
    return tensor * (sizes > bound).to(tensor.dtype)


def _clipping(view: View, seen: Observation) -> View:
    norm = float(squared_norm(view.target.values()).sqrt())
    return _mimicking(view, _ClippedTo(norm, tuple(view.target)), "guesses are clipped to the norm of the update")


def _compression(view: View, seen: Observation) -> View:
    zeros = tuple((name, int((tensor == 0).sum())) for name, tensor in view.target.items())
    present = tuple((name, count) for name, count in zeros if count)
    return _mimicking(view, _WithZeros(present), "guesses are pruned as far as the update") if present else view


def _soteria(view: View, seen: Observation) -> View:
    blank = seen.inputs.blank(1, next(view.trainer.model.parameters()))
    layer, _ = final_linear(view.trainer.model, blank)
    name = f"{layer}.weight" if layer else "weight"
    if name not in view.target:
        return view
    weight = view.target[name]
    kept = (weight != 0).any(0, keepdim=True).to(weight.dtype).expand_as(weight).clone()
    note = "zero columns of the last layer are masked"
    return replace(view, weights={**view.weights, name: kept}, notes=(*view.notes, note))


def _mimicking(view: View, mimic: Defense, note: str) -> View:
    return replace(view, trainer=replace(view.trainer, defense=mimic), notes=(*view.notes, note))


_TRANSFORMS: Mapping[str, Callable[[View, Observation], View]] = {
    "none": lambda view, seen: view,
    "clipping": _clipping,
    "compression": _compression,
    "soteria": _soteria,
}


Regulariser: TypeAlias = Literal["tanh", "kl", "none"]


@dataclass(frozen=True, kw_only=True)
class Ggl(Preset):
    """GGL: searches a generator's latent for an image that explains the update, by CMA-ES, Adam or a Gaussian process.

    generator: whose latents are searched. optimizer: "cma_es", "adam" or "bayesian".
    iterations: each evaluates `population` points with CMA-ES, 10 with "bayesian", one with Adam.
    population: points of an iteration of CMA-ES.
    regulariser: "tanh", latents in (-1, 1); "kl", the divergence from N(0, 1); "none"; None: "tanh" for CMA-ES and "kl"
    for the others. kl: weight of that divergence. learning_rate: of Adam.
    expects: a defense that is also applied to guesses, with the strength estimated from the update.
    Reference: Li et al. 2022. Assumes: one example (labels as iDLG), or other labels; a generator of such images; the
    defense, if one is expected.
    Differs from the paper: Adam's rate has a warm-up and then falls as a cosine; the Gaussian process is
    scikit-learn's, in a trust region as in TuRBO-1, with expected improvement.
    """

    generator: GeneratorSource
    iterations: int = 500
    optimizer: Literal["cma_es", "adam", "bayesian"] = "cma_es"
    population: int = 50
    learning_rate: float = 0.1
    regulariser: Regulariser | None = None
    kl: float = 0.1
    expects: Expected = "none"

    def __post_init__(self) -> None:
        require_choice("optimizer", self.optimizer, _OPTIMIZERS)
        if self.regulariser is not None:
            require_choice("regulariser", self.regulariser, get_args(Regulariser))
        super().__post_init__()

    def matching(self) -> Matching:
        shared = self.shared()
        chosen = self.regulariser or ("tanh" if self.optimizer == "cma_es" else "kl")
        return replace(
            shared,
            matched=AsSeen(inner=shared.matched, defense=self.expects),
            objective=SquaredError(reduction="layer_mean"),
            labels=self.labels or Idlg(),
            sought=Latents(
                generator=self.generator,
                squash=chosen == "tanh",
                kl=self.kl if chosen == "kl" else 0.0,
                start="uniform" if self.optimizer == "cma_es" else "normal",
            ),
            optimizer=_OPTIMIZERS[self.optimizer](self),
        )

    @property
    def requires(self) -> frozenset[Knowledge]:
        facts = super().requires
        return facts if self.expects == "none" else facts | {Knowledge.DEFENSE}


_OPTIMIZERS: Mapping[str, Callable[[Ggl], Optimizer]] = {
    "cma_es": lambda ggl: CmaEs(population=ggl.population),
    "adam": lambda ggl: Adam(learning_rate=ggl.learning_rate, decay="cosine", warm_up=ggl.iterations // 20),
    "bayesian": lambda ggl: Bayesian(),
}
