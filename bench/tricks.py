"""What a malicious server sends: models of the agreed architecture whose gradients carry single examples.

Every trick changes the parameters of one honest model; nothing is inserted. It works on the first hidden linear layer,
or on the first convolution, whose channels then are the units: a channel that is active for one image alone has the
gradient of that image's patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.core.types import Mode, Params
from leaktight.models.surgery import CONVOLUTIONS, batch_statistics, final_linear, layers_in_order, mode_of


@dataclass(frozen=True)
class Victim:
    """What the server knows: the network, an honest state of it, public images, and how many examples an update has."""

    model: nn.Module
    params: Params
    buffers: Params
    public: Tensor
    batch: int
    generator: torch.Generator
    mode: Mode = "train"


class Site(NamedTuple):
    """The layer whose units become traps, the batch norm after it, and the layer that reads its units."""

    layer: str
    norm: str | None
    reader: str

    @property
    def shift(self) -> str:
        return f"{self.norm or self.layer}.bias"


_MOVE = 4.0


def site_of(model: nn.Module) -> Site:
    layers = layers_in_order(model, (nn.Linear, *CONVOLUTIONS, _BatchNorm))
    plain = [name for name, layer in layers if not isinstance(layer, _BatchNorm)]
    head = final_linear(model)[0]
    hidden = [name for name, layer in layers if isinstance(layer, nn.Linear) and name != head]
    first = hidden[0] if hidden else plain[0]
    after = [name for name, _ in layers][[name for name, _ in layers].index(first) + 1]
    norm = after if isinstance(model.get_submodule(after), _BatchNorm) else None
    return Site(first, norm, plain[plain.index(first) + 1])


def answers(victim: Victim, params: Params, site: Site, images: Tensor) -> Tensor:
    """The largest value of each unit before its activation, over the places of an image: (N, units)."""
    kept: list[Tensor] = []
    model = batch_statistics(victim.model)
    handle = model.get_submodule(site.norm or site.layer).register_forward_hook(
        lambda module, args, output: kept.append(output.detach())
    )
    try:
        with torch.no_grad(), mode_of(model, victim.mode):
            functional_call(model, ({**params}, {**victim.buffers}), (images,))
    finally:
        handle.remove()
    return kept[0] if kept[0].ndim == 2 else kept[0].flatten(2).amax(2)


def trap_weights(victim: Victim, strength: float = 1.0) -> dict[str, Tensor]:
    """Trap weights: rows of random weights, half of them negative and larger, so that units are active by exception.

    The factor on the negative half is the one with which most public images, in batches of `batch`, are alone in a
    unit. `strength` (0 to 1) goes part of the way there from 1, with which units are active for half of the images.
    Batch norm takes the factor away, and no factor makes a channel silent in a whole image, so there the shift does the
    work, as in `quantile_biases`.
    Reference: Boenisch et al., When the curious abandon honesty, EuroS&P 2023.
    """
    site = site_of(victim.model)
    name = f"{site.layer}.weight"
    old = victim.params[name]
    size = old[0].numel()
    drawn = torch.randn(len(old), size, generator=victim.generator).abs() * old.std()
    negative = torch.rand(len(old), size, generator=victim.generator).argsort(1) < size // 2
    none = torch.zeros_like(victim.params[site.shift])

    def rows(factor: float) -> dict[str, Tensor]:
        made = torch.where(negative, -factor * drawn, drawn).reshape(old.shape)
        return {**victim.params, name: made, site.shift: none}

    if site.norm or old.ndim > 2:
        return quantile_biases(replace(victim, params=rows(1.0)), 1 / max(strength, 1e-3))
    factors = [1.0 + 0.02 * step for step in range(50)] + [2.0, 2.5, 3.0, 4.0]
    caught = [_caught(answers(victim, rows(factor), site, victim.public) > 0, victim.batch) for factor in factors]
    best = factors[max(range(len(factors)), key=caught.__getitem__)]
    return _steep(victim, rows(1.0 + strength * (best - 1.0)), site)


def _caught(active: Tensor, batch: int) -> float:
    """The share of images that are alone in some unit, from the activity (N, units), in batches."""
    parts = [part for part in active.split(batch) if len(part) == batch]
    alone = [(part & (part.sum(0) == 1)).any(1).double().mean() for part in parts]
    return float(torch.stack(alone).mean())


def quantile_biases(victim: Victim, strength: float = 1.0) -> dict[str, Tensor]:
    """QBI: honest rows, and biases with which each unit is active for `strength` of `batch` public images.

    Reference: Nowak et al., QBI: Quantile-Based Bias Initialization for Efficient Private Data Reconstruction, 2024.
    """
    site = site_of(victim.model)
    seen = answers(victim, victim.params, site, victim.public)
    least = seen.quantile(1 - min(strength / victim.batch, 1.0), dim=0)
    params = {**victim.params, site.shift: victim.params[site.shift] - least}
    return _steep(victim, params, site)


def split_imprint(victim: Victim, directions: int = 4) -> dict[str, Tensor]:
    """An imprint over several directions: the units of each direction share a row and have thresholds of their own.

    The layer after it reads all units of one direction alike, so that neighbours differ by the examples between them.
    Reference: Fowl et al., Robbing the Fed, ICLR 2022; several directions so that no direction holds all rows.
    """
    site = site_of(victim.model)
    name, reader = f"{site.layer}.weight", f"{site.reader}.weight"
    weight, back = victim.params[name].clone(), _unit_columns(victim, site)
    units = len(weight)
    group = torch.arange(units) * directions // units
    lead = torch.tensor([int((group == each).nonzero()[0]) for each in range(directions)])
    params = {**victim.params, name: weight[lead[group]]}
    place = torch.cat([torch.arange(int((group == each).sum())) for each in range(directions)])
    count = torch.bincount(group)[group]
    params = _ladder(victim, params, site, (place + 0.5) / count)
    params[reader] = _readers(victim, site, back[lead[group]])
    return params


def disguised_imprint(victim: Victim, directions: int = 16, noise: float = 0.6) -> dict[str, Tensor]:
    """A split imprint whose rows do not look alike: each has a part of its own along which images hardly differ.

    The part is `noise` times as long as the shared one, so that the cosine of two rows is 1 / (1 + noise^2), and lies
    in the quarter of the directions in which the layer's inputs of public images vary least. With many directions the
    rows of the layer after it do not look alike either.
    """
    site = site_of(victim.model)
    name = f"{site.layer}.weight"
    directions = min(directions, len(victim.params[name]) // 4)
    made = split_imprint(victim, directions)
    rows = made[name].flatten(1)
    flat = _flat_directions(victim, site)
    own = torch.randn(len(rows), flat.shape[1], generator=victim.generator) @ flat.T
    own = own / own.norm(dim=1, keepdim=True) * rows.norm(dim=1, keepdim=True) * noise
    group = torch.arange(len(rows)) * directions // len(rows)
    place = torch.cat([torch.arange(int((group == each).sum())) for each in range(directions)])
    shares = (place + 0.5) / torch.bincount(group)[group]
    return _ladder(victim, {**made, name: (rows + own).reshape(made[name].shape)}, site, shares)


def _flat_directions(victim: Victim, site: Site) -> Tensor:
    """The quarter of the directions (inputs, k) of a layer's inputs, or patches, along which they vary least."""
    kept: list[Tensor] = []
    layer = victim.model.get_submodule(site.layer)
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(args[0].detach()))
    try:
        with torch.no_grad(), mode_of(victim.model, "eval"):
            functional_call(victim.model, ({**victim.params}, {**victim.buffers}), (victim.public,))
    finally:
        handle.remove()
    seen = kept[0]
    if isinstance(layer, nn.Conv2d):
        seen = nn.functional.unfold(seen, layer.kernel_size).transpose(1, 2).flatten(0, 1)
    _, vectors = torch.linalg.eigh(torch.cov(seen.double().T))
    least: Tensor = vectors[:, : max(1, len(vectors) // 4)].to(seen.dtype)
    return least


def mirrored_pairs(victim: Victim) -> dict[str, Tensor]:
    """Pairs of units that mirror each other: the same row, neighbouring thresholds, opposite readers.

    What a pair adds to the network cancels but for the examples between its thresholds, and so do its gradients.
    """
    site = site_of(victim.model)
    name, reader = f"{site.layer}.weight", f"{site.reader}.weight"
    weight, back = victim.params[name].clone(), _unit_columns(victim, site)
    lead = torch.arange(len(weight)) // 2 * 2
    params = {**victim.params, name: weight[lead]}
    middle = torch.rand(len(weight), generator=victim.generator)[lead] * (1 - 2 / victim.batch)
    second = torch.arange(len(weight)) % 2
    params = _ladder(victim, params, site, middle + (0.5 + second) / victim.batch)
    signs = 1.0 - 2.0 * second
    params[reader] = _readers(victim, site, back[lead] * signs.reshape(-1, *[1] * (back.ndim - 1)))
    return params


def mirrored_head(victim: Victim, strength: float = 1.0, target: int = 1) -> dict[str, Tensor]:
    """A last layer whose rows mirror each other: w for the wanted class, -w for all others, of ordinary length.

    Where w makes the wanted class unlikely, examples of other classes send nothing into the network: fishing without
    long rows or biases. w points against the mean of the features. strength: factor on the ordinary length.
    """
    name = final_linear(victim.model)[0]
    kept: list[Tensor] = []
    model = batch_statistics(victim.model)
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(args[0].detach()))
    try:
        with torch.no_grad(), mode_of(model, victim.mode):
            functional_call(model, ({**victim.params}, {**victim.buffers}), (victim.public,))
    finally:
        handle.remove()
    old = victim.params[f"{name}.weight"]
    middle = kept[0].mean(0)
    length = strength * max(float(old.norm(dim=1).median()), 10.0 / float(middle.norm()))
    rows = (length * middle / middle.norm()).expand_as(old).clone()
    rows[target] = -rows[target]
    made = {**victim.params, f"{name}.weight": rows}
    if f"{name}.bias" in made:
        made[f"{name}.bias"] = torch.zeros_like(made[f"{name}.bias"])
    return made


def _unit_columns(victim: Victim, site: Site) -> Tensor:
    """The weights with which the next layer reads each unit, (units, ...)."""
    weight = victim.params[f"{site.reader}.weight"]
    units = len(victim.params[f"{site.layer}.weight"])
    return weight.reshape(len(weight), units, -1).transpose(0, 1).clone()


def _readers(victim: Victim, site: Site, columns: Tensor) -> Tensor:
    """The inverse of `_unit_columns`."""
    return columns.transpose(0, 1).reshape(victim.params[f"{site.reader}.weight"].shape).contiguous()


def _ladder(victim: Victim, params: Params, site: Site, shares: Tensor) -> dict[str, Tensor]:
    """The parameters with thresholds at these shares (units,) of the public images' answers."""
    params = {**params, site.shift: torch.zeros_like(params[site.shift])}
    if site.norm:
        params[f"{site.norm}.weight"] = torch.ones_like(params[f"{site.norm}.weight"])
    seen = answers(victim, params, site, victim.public)
    edges = torch.stack([seen[:, unit].quantile(float(share)) for unit, share in enumerate(shares.clamp(0, 1))])
    return _steep(victim, {**params, site.shift: -edges}, site)


def _steep(victim: Victim, params: Params, site: Site) -> dict[str, Tensor]:
    """With sigmoids: the layer scaled up, so that a unit has a gradient near its threshold alone, and that moved a bit.

    Without the move, patches of zeros are at the threshold of units without a bias.
    """
    smooth = any(isinstance(module, nn.Sigmoid | nn.Tanh) for module in victim.model.modules())
    if not smooth:
        return dict(params)
    spread = float(answers(victim, params, site, victim.public).std(0).mean())
    factor = victim.batch / max(spread, 1e-6)
    weight = f"{site.norm or site.layer}.weight"
    return {**params, weight: factor * params[weight], site.shift: factor * params[site.shift] - _MOVE}


TRICKS: Mapping[str, Callable[[Victim], dict[str, Tensor]]] = {
    "trap weights": trap_weights,
    "QBI": quantile_biases,
    "split imprint": split_imprint,
    "mirrored pairs": mirrored_pairs,
    "mirrored last layer": mirrored_head,
}
