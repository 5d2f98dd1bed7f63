"""AdaDefense's stand-ins solved for the gradients behind them, and the moments of a client after its rounds.

With known moments the stand-in r of an entry is a function of its gradient g, r (sqrt(C + D g^2) + epsilon) = A + B g:
a quadratic equation with one or two solutions. All values have the sign of the update, be it a gradient or a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leaktight.core.types import Params, State, Update
from leaktight.defenses.adadefense import CODE_SCALE, AdaDefense

_ROUNDING = 0.35  # standard error of a stand-in after all roundings on its way, in units of the last place of 1
_SMALL = 0.01  # entries of less than a tenth of the root mean square have errors of that size
_ALIKE = 1e-5  # relative; two branches of yogi have nearly the same solution where epsilon outweighs the gradient
_CLEAR = 0.25  # a guess tells two solutions apart if it is nearer to one than this share of their distance


@dataclass(frozen=True)
class Moments:
    """What an attacker has worked out of a client's memory, in float64.

    state: as the defense has it. first, second: the standard errors of the moments, by name.
    """

    state: State = field(default_factory=lambda: {"time": 0, "first": {}, "second": {}})
    first: Params = field(default_factory=dict)
    second: Params = field(default_factory=dict)

    def of(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments of a tensor."""
        zero = torch.zeros_like(like)
        return self.state["first"].get(name, zero), self.state["second"].get(name, zero)

    def errors(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Their standard errors."""
        zero = torch.zeros_like(like)
        return self.first.get(name, zero), self.second.get(name, zero)

    def after(self, gradient: Params, errors: Params, defense: AdaDefense) -> Moments:
        """The moments after a round with this gradient, which is known up to these standard errors."""
        kept = defense.beta2 if defense.form == "adam" else 1.0
        gain = 1.0 if defense.form == "adagrad" else 1 - defense.beta2
        first, second = {}, {}
        for name, error in errors.items():
            before = self.errors(name, error)
            first[name] = defense.beta1 * before[0] + (1 - defense.beta1) * error
            second[name] = kept * before[1] + gain * 2 * gradient[name].abs() * error
        return Moments(defense.stand_in(gradient, self.state)[1], first, second)


@dataclass(frozen=True, kw_only=True)
class Solved(Update):
    """An update whose tensors are the solutions behind a stand-in, in float64.

    other: second solutions, NaN where there is one only; `tensors` has the smaller of two. errors, other_errors:
    standard errors of both, infinite where there is no solution.
    """

    other: Params
    errors: Params
    other_errors: Params


def solved(update: Update, defense: AdaDefense, moments: Moments, scale: float = 1.0) -> Solved:
    """The solutions behind an update. scale: the server's factor on stand-ins; 1 for what a client sends."""
    tensors, other, errors, other_errors = {}, {}, {}, {}
    for name, sent in update.tensors.items():
        stand_in, unit = sent.to(torch.float64) / scale, torch.finfo(sent.dtype).eps
        if not moments.state["time"]:
            limit = first_step(defense)[0] * (1 - unit / 4)  # rounding may have put values at the limit
            stand_in = stand_in.clamp(-limit, limit)
        found, spread = _solutions(name, stand_in, _ROUNDING * unit * stand_in.abs(), defense, moments)
        tensors[name], other[name] = found
        errors[name], other_errors[name] = spread
    kept = {**vars(update), "tensors": tensors}
    return Solved(**kept, other=other, errors=errors, other_errors=other_errors)


def first_step(defense: AdaDefense) -> tuple[float, float]:
    """a and e of a first stand-in: a g / (|g| + e), or a g / sqrt(g^2 + e) with epsilon inside the root."""
    if defense.variant == "paper":
        return 1.0, defense.epsilon
    root = math.sqrt(1 - defense.beta2)
    if defense.form == "adagrad":
        return CODE_SCALE * root, defense.epsilon
    return CODE_SCALE, defense.epsilon / root


def settled(found: Solved, guessed: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient that solutions and the update of a guess show together, and its standard errors.

    Both are weighed by their precision. The error of the guess's update grows with the entry; how much is what makes
    its distances from the solutions of the tensor most likely.
    """
    factor = fitted_factor(found, guessed)
    gradient, errors = {}, {}
    for name in found.tensors:
        near = guessed[name].to(torch.float64) * factor
        value, error = nearest(found, name, near)
        unit = near.square() + _SMALL * near.square().mean() + torch.finfo(torch.float64).tiny
        known = error.isfinite()
        off, blur = ((value - near).square() / unit)[known], (error.square() / unit)[known]
        own = 1 / (unit * _variance_beside(off, blur))
        precision = 1 / (error.square() + 1e-18 * unit)
        gradient[name] = (value * precision + near * own) / (precision + own)
        errors[name] = (precision + own).rsqrt()
    return gradient, errors


def _variance_beside(squares: Tensor, known: Tensor) -> float:
    """The most likely variance beside known ones, from squared distances of the sum of both errors."""
    variance = float(squares.mean()) if len(squares) else 1.0
    for _ in range(30):
        weight = (known + variance + 1e-18).reciprocal().square()
        variance = max(float((weight * (squares - known)).sum() / weight.sum()), 1e-18) if len(squares) else 1.0
    return variance


def nearest(found: Solved, name: str, guessed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The solutions of a tensor, the nearer of two; with an infinite error where the guess does not tell."""
    value, error, other = found.tensors[name], found.errors[name], found.other[name]
    double = other.isfinite()
    if guessed is None:
        return value, error.masked_fill(double, math.inf)
    farther = (guessed - value).abs() > (guessed - other).abs()
    chosen, spread = value.where(~farther, other), error.where(~farther, found.other_errors[name])
    unclear = double & ((guessed - chosen).abs() > _CLEAR * (other - value).abs())
    return chosen, spread.masked_fill(unclear, math.inf)


def fitted_factor(found: Solved, guessed: Params) -> float:
    """What the update of a guess has to be multiplied by to meet the single solutions best."""
    above = below = 0.0
    for name in found.tensors:
        value, error = nearest(found, name, None)
        square = value.square()
        blur = error.square() + 1e-6 * square + 1e-10 * square.mean() + torch.finfo(torch.float64).tiny
        weight = blur.reciprocal()
        near = guessed[name].to(torch.float64)
        above += float((weight * value * near).sum())
        below += float((weight * near.square()).sum())
    return above / below if below > 0 else 1.0


def _solutions(
    name: str, stand_in: Tensor, error: Tensor, defense: AdaDefense, moments: Moments
) -> tuple[Tensor, Tensor]:
    """The smaller and the larger solution (2, ...), and their standard errors. Solutions are checked one by one."""
    roots: list[Tensor] = []
    spreads: list[Tensor] = []
    for root in _roots(name, stand_in, defense, moments):
        again, along, first, second = _slopes(name, root.nan_to_num(0.0, 0.0, 0.0), defense, moments)
        doubts = moments.errors(name, stand_in)
        spread = (error.square() + (first * doubts[0]).square() + (second * doubts[1]).square()).sqrt() / along.abs()
        right = root.isfinite() & ((again - stand_in).abs() <= 1e-6 * stand_in.abs() + 1e-18)
        new = right.clone()
        for known in roots:
            new &= ~((root - known).abs() <= _ALIKE * root.abs())
        roots.append(root.where(new, math.nan))
        spreads.append(spread.nan_to_num(math.inf).where(new, math.inf))
    order = torch.stack(roots).abs().nan_to_num(math.inf).argsort(0)[:2]
    found, spread = torch.stack(roots).gather(0, order), torch.stack(spreads).gather(0, order)
    found[0].nan_to_num_(0.0)
    return found, spread


def _roots(name: str, stand_in: Tensor, defense: AdaDefense, moments: Moments) -> Iterator[Tensor]:
    """Candidates: both solutions of each quadratic equation, which may be of another branch or not be numbers."""
    for scale, (a, b, c, d) in _equations(name, stand_in, defense, moments):
        r = stand_in / scale
        offset, c = (a, c + defense.epsilon) if defense.epsilon_inside else (a - r * defense.epsilon, c)
        lead = b**2 - r.square() * d
        half = b * offset
        root = r.abs() * (d * offset.square() + c * lead).clamp(min=0).sqrt()
        sum_ = -(half + root.copysign(half))
        yield sum_ / lead
        yield (offset.square() - r.square() * c) / sum_


def _equations(
    name: str, like: Tensor, defense: AdaDefense, moments: Moments
) -> Iterator[tuple[float, tuple[Tensor, float, Tensor, float]]]:
    """For each branch of the second moment the factor on the step, and A, B, C and D."""
    first, second = moments.of(name, like)
    time, beta1, beta2 = moments.state["time"] + 1, defense.beta1, defense.beta2
    scale, correct1, correct2 = 1.0, 1.0, 1.0
    if defense.variant == "code":
        late = max(time - 1, 1)
        scale = CODE_SCALE * math.sqrt(1 - beta2**late) / (1 - beta1**late)
    elif defense.form == "adagrad":
        beta1, first = 0.0, torch.zeros_like(first)
    else:
        correct1, correct2 = 1 - beta1**time, 1 - beta2**time
    kept = beta2 if defense.form == "adam" else 1.0
    gains = {"adam": (1 - beta2,), "adagrad": (1.0,), "yogi": (1 - beta2, beta2 - 1)}[defense.form]
    for gain in gains:
        yield scale, (beta1 * first / correct1, (1 - beta1) / correct1, kept * second / correct2, gain / correct2)


def _slopes(name: str, gradient: Tensor, defense: AdaDefense, moments: Moments) -> tuple[Tensor, ...]:
    """The stand-in, and its derivatives in the gradient and in both moments."""
    first, second = (each.clone().requires_grad_() for each in moments.of(name, gradient))
    here = gradient.where(gradient != 0, 1e-30).requires_grad_()  # the root has no slope at zero
    state = {"time": moments.state["time"], "first": {name: first}, "second": {name: second}}
    with torch.enable_grad():
        result = defense.stand_in({name: here}, state)[0][name]
        slopes = torch.autograd.grad(result.sum(), (here, first, second), allow_unused=True)
    return result.detach(), *(torch.zeros_like(here) if each is None else each.detach() for each in slopes)
