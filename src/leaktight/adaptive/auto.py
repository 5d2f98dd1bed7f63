"""`auto`: a fixed ensemble of attacks, the cheapest first, with nothing to tune.

Closed forms, csDLG, DLG, Inverting Gradients, AGIC, GRNN; where the defense is known, closed forms and the forms of
these attacks that are adapted to it. The ensemble stops once an attack proves its guess or explains the update
(`ENOUGH`). Otherwise the answer is chosen by what the attacker itself can compute (`evidence.choose`), never by truth.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, TypeVar

from torch import Tensor

from leaktight.adaptive.evidence import EXPLAINED, Candidate, choose, weigh
from leaktight.adaptive.knowing import Adaptation, Knowing
from leaktight.attacks.exact.cocktail_party import CocktailParty
from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.attacks.exact.peeling import Peeling
from leaktight.attacks.exact.rgap import RGap
from leaktight.attacks.exact.spear import Spear
from leaktight.attacks.generative.grnn import Grnn
from leaktight.attacks.labels.rules import rule_for
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.attacks.presets.preset import Preset
from leaktight.core.devices import device_of, moved
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.faults import raise_fault
from leaktight.core.inputs import Inputs
from leaktight.core.protocols import Attack, LabelSource, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation, Reconstruction
from leaktight.models.source import require_choice

Budget: TypeAlias = Literal["quick", "standard", "thorough"]
T = TypeVar("T", bound=Attack)

MOST_SIMULATED = 16
"""The most local steps that are simulated; more are treated as one step, which is faster and less exact."""

LARGE = 200_000
"""Parameters from which on attacks by L-BFGS are left out, but for a thorough search: they are slow and weak there."""

KNOWING = "(knowing the defense)"

_EXACT: Mapping[str, Attack] = {
    "linear_inversion": LinearInversion(),
    "rgap": RGap(tolerance=0.01),
    "spear": Spear(),
    "peeling": Peeling(),
}

ENSEMBLES: Mapping[Budget, Mapping[str, Attack]] = {
    "quick": {
        **{name: attack for name, attack in _EXACT.items() if name != "rgap"},
        "csdlg": CsDlg(iterations=9, coarse=3, patience=30, check_every=10),
        "rgap": _EXACT["rgap"],  # takes longer than so short a search
        "dlg": Dlg(iterations=12, restarts=1, patience=30, check_every=10),
        "inverting_gradients": InvertingGradients(iterations=200, learning_rate=0.05, decay="cosine"),
    },
    "standard": {
        **_EXACT,
        "csdlg": CsDlg(iterations=50, coarse=10, restarts=2, patience=100, check_every=20),
        "dlg": Dlg(iterations=60, restarts=2, patience=100, check_every=20),
        "inverting_gradients": InvertingGradients(iterations=1200, learning_rate=0.1),
        "agic": Agic(iterations=1200),
        "cocktail_party": CocktailParty(),
        "grnn": Grnn(iterations=1000),
    },
    "thorough": {
        **_EXACT,
        "csdlg": CsDlg(coarse=15, restarts=4),
        "dlg": Dlg(restarts=4),
        "inverting_gradients": InvertingGradients(),
        "agic": Agic(iterations=4800),
        "cocktail_party": CocktailParty(),
        "grnn": Grnn(iterations=4000),
    },
}
"""The attacks of each budget by name, in the order in which they run. Settings are the same for every victim."""

ENOUGH: Mapping[Budget, float] = {"quick": 1e-6, "standard": EXPLAINED, "thorough": EXPLAINED}
"""The residual of a guess after which no further attack runs. On the updates tried, a later attack of a quick ensemble
never left less."""

ADAPTED: tuple[str, ...] = ("csdlg", "inverting_gradients")
"""The attacks that run in their adapted form where the defense is known; the others, but for closed forms, do not."""


_BY_LBFGS = ("csdlg", "dlg")
_JOINTLY = ("dlg",)
_ONE_STEP = ("spear", "peeling", "cocktail_party")
_SEVERAL_EXAMPLES = ("cocktail_party",)


@dataclass(frozen=True, kw_only=True)
class Auto(Attack):
    """A fixed ensemble of attacks, the cheapest first: closed forms, csDLG, DLG, Inverting Gradients, AGIC, GRNN.

    budget: "quick" has few iterations, "standard" more and all attacks, "thorough" as many as papers have.
    labels: whether labels are "given" by the threat model, or "inferred" from the update by the rule that fits it.
    onednn: whether convolutions use oneDNN; None: each attack decides.

    It ends with the first guess that is proven or that explains the update up to rounding; a quick one, up to a
    millionth. Searches by L-BFGS end where their loss stands still, unless thorough. Otherwise the answer is
    chosen by the attacker's own evidence: how well the update of each guess fits the observed one, and how smooth
    images are. Labels are also read by a rule that is not told them, and reported apart.
    Attacks that fail on a network or for want of what is not disclosed are left out; notes say which and why. Not tried
    are L-BFGS on large networks unless thorough, exact attacks on several local steps, and DLG, which searches for
    labels too, in a quick search that knows them.
    """

    budget: Budget = "standard"
    labels: Literal["given", "inferred"] = "given"
    onednn: bool | None = None

    def __post_init__(self) -> None:
        require_choice("budget", self.budget, ENSEMBLES)
        require_choice("labels", self.labels, ("given", "inferred"))

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return frozenset[type[Inputs]]().union(*(each.takes for each in ENSEMBLES[self.budget].values()))

    @property
    def labels_from(self) -> LabelSource:
        return self.labels

    @property
    def joins_rounds(self) -> bool:
        return True

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, onednn=onednn if self.onednn is None else self.onednn)

    def fitted(self, seen: Observation) -> Self:
        return replace(self, labels="inferred" if seen.labels is None else "given")

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        return self.run(seen, None, rng=rng, progress=progress)

    def run(
        self, seen: Sequence[Observation], adaptation: Adaptation | None, *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        """Run the ensemble, with this adaptation if the defense is known."""
        require_seen(self, seen)
        seen = [replace(each, labels=None) for each in seen] if self.labels == "inferred" else seen
        first = seen[0]
        found: list[Candidate] = []
        skipped: dict[str, str] = {}
        for name, attack in self.members(first, adaptation):
            given = seen if attack.joins_rounds else seen[-1:]
            try:
                guess = attack.reconstruct(given, rng=rng.child("member", name), progress=progress)
                guess = moved(guess, device_of(first.update.tensors))
                weighed = weigh(name, guess, seen, knows=isinstance(attack, Knowing))
            except LeaktightError as error:
                raise_fault(error)
                skipped[name] = str(error)
                continue
            except Exception as error:  # a defect in one attack must not end the others
                raise_fault(error)
                skipped[name] = f"{type(error).__name__}: {error}"
                warnings.warn(f"auto went on without {name}, which failed: {skipped[name]}", stacklevel=2)
                continue
            if not attack.searches:  # there is no search whose loss could fall
                weighed = replace(weighed, found=replace(weighed.found, first_loss=None))
            found.append(weighed)
            if weighed.settled(ENOUGH[self.budget]):
                break
        if not found:
            same = {why: [name for name in skipped if skipped[name] == why] for why in skipped.values()}
            reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in same.items())
            raise UsageError(f"expected an update that an attack can read, got none: {reasons}")
        return _answer(found, skipped, _labels(first, rng))

    def members(self, seen: Observation, adaptation: Adaptation | None) -> Iterator[tuple[str, Attack]]:
        """The attacks for this kind of input, each with its name, fitted to what is disclosed."""
        large = sum(tensor.numel() for tensor in seen.broadcast.params.values()) >= LARGE
        for name, attack in ENSEMBLES[self.budget].items():
            if type(seen.inputs) not in attack.takes:
                continue
            hopeless = (
                (name in _BY_LBFGS and large and self.budget != "thorough")
                or (name in _JOINTLY and seen.labels is not None and self.budget == "quick")
                or (name in _ONE_STEP and (seen.num_steps or 1) > 1)
                or (name in _SEVERAL_EXAMPLES and seen.batch_size == 1)
            )
            if hopeless:
                continue
            fitted = self._fit(attack, seen)
            if adaptation is None or name in _EXACT:
                yield name, fitted
            elif name in ADAPTED and isinstance(fitted, Preset):
                yield f"{name} {KNOWING}", Knowing(attack=fitted, adaptation=adaptation)

    def _fit(self, attack: T, seen: Observation) -> T:
        fitted = attack.fitted(seen)
        if isinstance(fitted, Preset) and (seen.num_steps or 0) > MOST_SIMULATED:
            fitted = replace(fitted, local="one_batch")
        return fitted if self.onednn is None else fitted.pinned(onednn=self.onednn)


@dataclass(frozen=True, kw_only=True)
class KnowingAuto(Attack):
    """The ensemble `auto` of an attacker who knows the defense: closed forms, then attacks adapted to it.

    Assumes: the defense with all its settings (DEFENSE), not its secrets.
    """

    auto: Auto
    adaptation: Adaptation

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return self.auto.takes

    @property
    def requires(self) -> frozenset[Knowledge]:
        return frozenset({Knowledge.DEFENSE})

    @property
    def labels_from(self) -> LabelSource:
        return self.auto.labels_from

    @property
    def joins_rounds(self) -> bool:
        return self.auto.joins_rounds

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, auto=self.auto.pinned(onednn=onednn))

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        return self.auto.run(seen, self.adaptation, rng=rng, progress=progress)


def _answer(found: Sequence[Candidate], skipped: Mapping[str, str], labels: Tensor | None) -> Reconstruction:
    """The chosen guess; the others are kept for whoever may compare them with the truth."""
    best = choose(found)
    notes = {
        **best.found.notes,
        "chosen": best.name,
        "residuals": {each.name: each.residual for each in found},
        "left out": dict(skipped),
    }
    others = {each.name: each.found.guess for each in found if each is not best}
    return replace(best.found, notes=notes, others=others, labels=labels)


def _labels(seen: Observation, rng: Rng) -> Tensor | None:
    """The labels as a rule reads them that is not told them; None if no rule fits."""
    blind = replace(seen, labels=None)
    rule = rule_for(blind)
    if rule is None or seen.batch_size is None:
        return None
    try:
        return rule.infer(blind, seen.batch_size, rng=rng.child("labels"))
    except LeaktightError as error:
        raise_fault(error)
        return None
    except Exception as error:  # a defect in the rule must not lose the guess
        raise_fault(error)
        warnings.warn(f"auto read no labels: {type(error).__name__}: {error}", stacklevel=2)
        return None
