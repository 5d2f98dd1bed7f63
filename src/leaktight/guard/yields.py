"""How many examples an update would give away, and how few of them reach a unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaktight.guard.signals import Signal
from leaktight.guard.signs import PARALLEL, row_cosines

ALONE = 0.01
"""An example is alone in a gradient if the others together have less than this share: 40 dB and better."""

SELDOM = 0.15
"""A unit is rarely reached if less than this times as often as usual."""

SOME_UNITS = 8
"""Layers with fewer units are left out."""

TWINS = 0.98
"""The cosine, or its opposite, from which two units get the same from the examples that reach both."""

_SHARED = 4  # examples that reach both units of a pair; fewer agree by chance
_PAIRS = 4096


def given_away(layers: Sequence[Signal]) -> Tensor:
    """Which examples (N,) some unit, or the difference of two twins or units with like rows, carries alone.

    The last layer counts only where there is no other: its inputs are features, and its labels are no secret.
    """
    hidden = layers[:-1] if len(layers) > 1 else layers
    found = torch.zeros(len(layers[0].back), dtype=torch.bool)
    for layer in hidden:
        found[_alone(layer.strength)] = True
        found[_alone_in_pairs(layer)] = True
    return found


def _alone(strength: Tensor) -> Tensor:
    """The examples that are alone in a column of (N, units)."""
    most, who = strength.max(0)
    return who[(most > 0) & (most >= (1 - ALONE) * strength.sum(0))]


def _alone_in_pairs(layer: Signal) -> Tensor:
    first, second = _pairs(layer)
    if not len(first):
        return first
    left, right = layer.back[:, first], layer.back[:, second]  # (N, pairs, places)
    energy = right.square().sum(2)
    ratio = (left * right).sum(2) / energy.clamp_min(1e-38)
    ratio = torch.where(energy > 0, ratio, torch.nan).nanmedian(0).values.nan_to_num(0.0)
    rest = (left - ratio[:, None] * right).abs().sum(2)
    whole = layer.strength[:, first].amax(0)
    return _alone(torch.where(rest > 1e-5 * whole, rest, 0.0))


def _pairs(layer: Signal) -> tuple[Tensor, Tensor]:
    """Ordered pairs of twins, and of units with like rows; of many, twins first, and those that are most alike."""
    rows, signal = row_cosines(layer.rows), _likeness(layer)
    like = torch.where(signal > TWINS, 1 + signal, torch.where(rows > PARALLEL, rows, 0.0))
    values, places = like.flatten().topk(min(_PAIRS, like.numel()))
    places = places[values > 0]
    return places // len(rows), places % len(rows)


def _likeness(layer: Signal) -> Tensor:
    """How alike two units (units, units) are: the cosine of what they get from the examples that reach both.

    Examples count the same, however well learnt. 0 for a unit and itself, for pairs that few examples reach, and where
    what both get, by place, is less than half of what one gets.
    """
    sent = layer.back / layer.strength.sum(1).clamp_min(1e-38)[:, None, None]
    sent = sent.transpose(1, 2).flatten(0, 1)  # (N places, units)
    there = (sent != 0).to(sent.dtype)
    reached = (layer.strength > 0).to(sent.dtype)
    energy = sent.square().T @ there
    like = (sent.T @ sent).abs() / (energy * energy.T).sqrt().clamp_min(1e-38)
    overlap = energy > 0.5 * energy.diagonal()[:, None]
    known = overlap & overlap.T & (reached.T @ reached >= _SHARED)
    return torch.where(known, like, 0.0).fill_diagonal_(0.0)


def twins(layers: Sequence[Signal], usual: Sequence[Signal]) -> float:
    """Of the layer where it is largest: the share of units with a twin, above that of an honest network.

    A pair with a threshold each differs by the examples between the two, whatever their weights look like. Ends of
    intervals as in `rarity`.
    """
    before = {layer.name: _twinned(layer) for layer in usual[:-1]}
    large = [layer for layer in layers[:-1] if layer.name in before and layer.back.shape[1] >= SOME_UNITS]
    return max((_bound(_twinned(layer), -1) - _bound(before[layer.name], 1) for layer in large), default=0.0)


def _twinned(layer: Signal) -> Tensor:
    return (_likeness(layer).amax(1) > TWINS).double()


def reach(layer: Signal, kept: Tensor) -> Tensor:
    """The share of the examples that reach each unit at some place, (units,).

    An example reaches a unit where what it sends there is above a hundredth of the most, with examples scaled to send
    the same to the layer: those that are well learnt send less. kept: the examples with an error at the outputs.
    """
    sent = layer.strength[kept]
    sent = sent / sent.sum(1, keepdim=True).clamp_min(1e-38)
    return ((sent > 0.01 * sent.amax(0)) & (sent > 0)).double().mean(0)


def rarity(layers: Sequence[Signal], usual: Sequence[Signal]) -> tuple[float, float]:
    """Of the layer where it is largest: the share of units that are rarely reached, and how much less often all are.

    usual: the signals of an honest network for the same examples. The second is of the mean over units: 0 for as often
    as there, or more, and 1 for never. Both are lower ends of intervals of two standard errors over units: a few units
    differ by chance.
    """
    kept = layers[-1].strength.sum(1) > 0
    before = {layer.name: reach(layer, kept) for layer in usual[:-1]}
    rare, quiet = [0.0], [0.0]
    for layer in layers[:-1] if int(kept.sum()) > 1 else ():
        often, then = reach(layer, kept), before.get(layer.name)
        if then is None or len(often) < SOME_UNITS:
            continue
        seldom = ((often < SELDOM * then.median()) & (often > 0)).double()
        rare.append(_bound(seldom, -1))
        if (least := _bound(then, -1)) > 0:
            quiet.append(1 - _bound(often, 1) / least)
    return max(rare), max(quiet)


def _bound(values: Tensor, side: int) -> float:
    """The mean, and two standard errors to a side."""
    return float(values.mean() + side * 2 * values.std() / len(values) ** 0.5)


def hushed(head: Signal) -> float:
    """The share of the examples whose error at the outputs hardly enters the network through the last layer.

    An honest layer passes every error on, more or less; one that passes only some makes an update of those alone.
    """
    error = head.back[:, :, 0].double()
    kept = error.norm(dim=1) > 1e-4
    if error.shape[1] < 2 or not bool(kept.any()):
        return 0.0
    rows = head.rows.double()
    most = torch.linalg.matrix_norm(rows - rows.mean(0), 2)
    passed = (error[kept] @ rows).norm(dim=1) / error[kept].norm(dim=1) / most.clamp_min(1e-30)
    return float((passed < 0.02).double().mean())
