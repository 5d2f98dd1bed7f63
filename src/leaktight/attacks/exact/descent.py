"""The values inside a ReLU network, solved convolution by convolution from a known one back towards the image.

Where the input of some convolution is known, so is everything behind it, and with it the gradient at the outputs of the
convolution before it. That gradient and the gradient of the weights, which was sent, give its input by least squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from leaktight.attacks.exact.analytic import Gradient
from leaktight.attacks.exact.equations import Equations, Fit, channels_first, let_through
from leaktight.attacks.exact.graph import Convolution, Graph, Known, Values
from leaktight.attacks.exact.patches import unmixed
from leaktight.core.errors import UsageError

_EXACT = 2e-5  # the largest relative residual of a solution; a wrong sign of a ReLU leaves more
_NEAR = 1e-3  # the same where the gradient at the outputs is not exact yet
_AGREES = 5e-2  # the largest relative difference of a gradient at outputs that was found in two ways
_MOST_OPEN = 600  # directions left open by the gradient that may be determined by known outputs
_MOST_WRONG = 8  # channels that are left out because a sign is wrong there
_SPARE = 1.5  # equations for each unknown that must be left then
_MOST_DOUBTS = 40  # signs that are tried the other way round
_TINY = 1e-30  # a value that is positive and nothing else


@dataclass(frozen=True)
class Solver:
    """number: how many images are behind the gradient."""

    graph: Graph
    gradient: Gradient
    number: int

    def run(self, known: Known) -> Values:
        return self.graph.run(torch.zeros(self.number, *self.graph.shape), known)

    @cached_property
    def shapes(self) -> dict[fx.Node, torch.Size]:
        """Of the values of all nodes."""
        return {node: value.shape for node, value in self.run({}).of.items()}

    def slope(self, each: Convolution) -> Tensor:
        return self.gradient.needed(f"{each.name}.weight")

    def slopes(self, values: Values) -> Tensor:
        """The gradient at the outputs (N, classes), from that of the last linear layer and the features it reads."""
        name, entered = str(self.graph.head.target), self.graph.head.args[0]
        assert isinstance(entered, fx.Node)
        bias = self.gradient.tensors.get(f"{name}.bias")
        if bias is not None and self.number == 1:
            return bias[None]
        features, wanted = values.of[entered].detach(), self.gradient.needed(f"{name}.weight")
        if bias is not None:
            features = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)
            wanted = torch.cat([wanted, bias[:, None]], 1)
        found: Tensor = (wanted @ torch.linalg.pinv(features)).T
        return found

    def signals(self, convolutions: Sequence[Convolution], values: Values) -> list[Tensor]:
        """The gradients at the outputs of convolutions, (N, C, h, w)."""
        return values.back([each.node for each in convolutions], self.graph.head, self.slopes(values))

    def start(self, generator: torch.Generator) -> Known:
        """The input of one of the last convolutions, or of its block, from which all that follows can be computed."""
        wide = [each for each in self.graph.convolutions if self._can_unmix(each)]
        if not wide:
            raise UsageError(
                f"expected a convolution behind a ReLU with at least as many channels as positions of "
                f"{self.number} images, got none; use a search"
            )
        for last in reversed(wide):
            known = self._begun(last, generator)
            if known is not None:
                return known
        raise UsageError("expected gradients of convolutions whose inputs can be told apart, got none; use a search")

    def _can_unmix(self, each: Convolution) -> bool:
        layer = each.layer
        same = layer.stride == (1, 1) == layer.dilation and self._solvable(each)
        kernel, other = layer.kernel_size
        square = kernel == other and kernel % 2 == 1 and kernel > 1
        keeps = layer.padding == (kernel // 2, kernel // 2)
        enough = self.shapes[each.node][2:].numel() * self.number <= layer.out_channels
        return (
            same and square and keeps and enough and self.graph.is_relu(each.entered) and self._total(each) is not None
        )

    def _begun(self, last: Convolution, generator: torch.Generator) -> Known | None:
        """The value of the nearest cut, if the gradient at `last` that follows from it is the one that was unmixed."""
        slope, total, size = self.slope(last), self._total(last), self.shapes[last.entered][2:]
        images = unmixed(slope, (size[0], size[1]), self.number, generator)
        if images is None or total is None:
            return None
        signal = _signal(slope, images, last.layer, size)
        factors = torch.linalg.lstsq(signal.sum((2, 3)).T, total[:, None]).solution[:, 0]
        if not bool((factors > 0).all()):
            return None
        factors = factors[:, None, None, None]
        signal = signal * factors
        known = self._up_to_a_cut({last.entered: images / factors}, last, signal)
        if known is None:
            return None
        values = self.run(known)
        again = self.signals([last], values)[0]
        return known if float((again - signal).norm()) < _AGREES * float(signal.norm()) else None

    def _total(self, each: Convolution) -> Tensor | None:
        """The gradient at the outputs of a convolution, summed over positions and images, (C,); None if it is unknown.

        It is that of its bias, or follows from that of the batch norm behind it.
        """
        if each.layer.bias is not None:
            return self.gradient.tensors.get(f"{each.name}.bias")
        norm = self.graph.norm_behind(each)
        if norm is None or norm.running_var is None:
            return None
        slope = self.gradient.tensors.get(f"{next(iter(each.node.users)).target}.bias")
        return None if slope is None else slope * norm.weight * (norm.running_var + norm.eps).rsqrt()

    def _up_to_a_cut(self, known: Known, last: Convolution, signal: Tensor) -> Known | None:
        """The value of the nearest cut before `last`, from the gradient at its outputs."""
        if last.entered in self.graph.cuts:
            return known
        inside = dict(known)
        for node, readers in self._entered():
            if last.entered not in self.graph.after(node):
                continue
            if not all(map(self._solvable, readers)):
                return None
            signals = self.run(inside).back([each.node for each in readers], last.node, signal)
            fit = _without_wrong(self._equations(node, readers, signals), _NEAR)
            found = None if fit is None else self._value(node, fit[0], inside)
            if found is None:
                return None
            inside[node] = found[0]
            if node in self.graph.cuts:
                return {node: found[0]}
        return None

    def _entered(self) -> Iterator[tuple[fx.Node, list[Convolution]]]:
        """The nodes that convolutions read, the last first, each with these convolutions."""
        nodes = {each.entered for each in self.graph.convolutions}
        for entered in reversed([node for node in self.graph.nodes if node in nodes]):
            yield entered, [each for each in self.graph.convolutions if each.entered is entered]

    def descend(self, known: Known) -> Known:
        """All values that can be solved, also those behind the known one, which become more exact by it."""
        found = dict(known)
        safe: dict[fx.Node, Tensor] = {}
        settled = {each for cut in known for each in (cut, *self.graph.after(cut))}
        for node, readers in self._entered():
            passed = {each for reader in readers for each in self.graph.after(reader.node)} - settled
            clear = all(map(self._solvable, readers)) and all(map(self.graph.is_linear, passed))
            solved = self._consistent(node, readers, found, safe) if clear else None
            if solved is not None:
                found, safe[node] = solved
                settled.add(node)
            elif node not in settled:
                break
        return found

    def _solvable(self, each: Convolution) -> bool:
        layer = each.layer
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return plain and f"{each.name}.weight" in self.gradient.tensors

    def _consistent(
        self, node: fx.Node, readers: Sequence[Convolution], known: Known, safe: Known
    ) -> tuple[dict[fx.Node, Tensor], Tensor] | None:
        """All values with that of a node, and how safe its signs are; wrong signs of ReLUs behind it are set right."""
        found = dict(known)
        fit = self._fit(node, readers, found)
        while fit is not None and fit.residual > _EXACT:
            repaired = self._flipped(node, readers, found, safe, fit) or self._repaired(node, readers, found)
            if repaired is None:
                return None
            found = repaired
            before, fit = fit, self._fit(node, readers, found)
            if fit is None or fit.residual > 0.9 * before.residual:
                return None
        solved = None if fit is None else self._value(node, fit, found)
        return None if solved is None else ({**found, node: solved[0]}, solved[1])

    def _fit(self, node: fx.Node, readers: Sequence[Convolution], known: Known) -> Fit | None:
        return self._equations(node, readers, self.signals(readers, self.run(known))).fit()

    def _flipped(
        self, node: fx.Node, readers: Sequence[Convolution], known: Known, safe: Known, fit: Fit
    ) -> dict[fx.Node, Tensor] | None:
        """The values after the change of one sign that was in doubt, if it makes the solution fit better."""
        best: tuple[float, dict[fx.Node, Tensor]] = 0.9 * fit.residual, {}
        gates = [gate for reader in readers if (gate := self._gate(reader)) is not None and gate in safe]
        for gate in dict.fromkeys(gates):
            for place in safe[gate].flatten().argsort()[:_MOST_DOUBTS]:
                value = known[gate].flatten().clone()
                value[place] = 0.0 if value[place] > 0 else _TINY
                tried = {**known, gate: value.reshape(known[gate].shape)}
                other = self._fit(node, readers, tried)
                if other is not None and other.residual < best[0]:
                    best = other.residual, tried
                if best[0] < _EXACT:
                    return tried
        return best[1] or None

    def _repaired(self, node: fx.Node, readers: Sequence[Convolution], known: Known) -> dict[fx.Node, Tensor] | None:
        """The values with the signs that channels show which do not fit the solution of the others."""
        values = self.run(known)
        equations = self._equations(node, readers, self.signals(readers, values))
        fitted = _without_wrong(equations, _EXACT)
        solved = None if fitted is None else self._value(node, fitted[0], known)
        if fitted is None or solved is None:
            return None
        used = fitted[1]
        found = dict(known)
        for each, fits in zip(readers, torch.split(used, [each.layer.out_channels for each in readers]), strict=True):
            gate = self._gate(each)
            if gate is None or bool(fits.all()):
                continue
            value = values.of[gate].detach()
            full = self.signals([each], self.run({**known, gate: value.clamp_min(_TINY)}))[0]
            shown = _signal(self.slope(each), solved[0], each.layer, full.shape[2:]) / full.where(full != 0, torch.inf)
            is_open = torch.where(fits[None, :, None, None], value > 0, shown > 0.5)
            found[gate] = torch.where(is_open, value.clamp_min(_TINY), 0.0)
        return found

    def _gate(self, each: Convolution) -> fx.Node | None:
        """The ReLU that lets the outputs of a convolution through."""
        node = each.node
        while not self.graph.is_relu(node):
            if len(node.users) != 1:
                return None
            (node,) = node.users
        return node

    def _equations(self, node: fx.Node, readers: Sequence[Convolution], signals: Sequence[Tensor]) -> Equations:
        slopes = [self.slope(each) for each in readers]
        return Equations.of([each.layer for each in readers], slopes, signals, self.shapes[node][2:])

    def _value(self, node: fx.Node, fit: Fit, known: Known) -> tuple[Tensor, Tensor] | None:
        """The value of a node by a solution, and how safe its signs are; None if it is not determined."""
        shape = self.shapes[node]
        solved = channels_first(fit.flat, shape)
        value = self._completed(node, solved, fit.openings, known) if len(fit.openings) else solved
        if value is None:
            return None
        if not self.graph.is_relu(node):
            return value, torch.full_like(value, torch.inf)
        return let_through(value, channels_first(fit.spread[:, None], (shape[0], 1, *shape[2:])))

    def _completed(self, node: fx.Node, value: Tensor, openings: Tensor, known: Known) -> Tensor | None:
        """A value whose open directions (k, N x H x W), of each channel, follow from the known outputs of ReLUs."""
        channels = value.shape[1]
        if len(openings) * channels > _MOST_OPEN:
            return None
        block = self.graph.block_after(node)
        ends = [
            (each, read, known[each] > 0)
            for each in known
            if each in block and (read := self.graph.gated(each)) and self.graph.follows(read, {*known, node})
        ]
        if not ends:
            return None

        def before(there: Tensor) -> Tensor:
            values = self.run({**known, node: there}).of
            return torch.cat([values[read].detach()[active] for _, read, active in ends])

        base = before(value)
        wanted = torch.cat([known[each][active] for each, _, active in ends])
        ways = torch.einsum("ku,cd->kcud", openings, torch.eye(channels, dtype=value.dtype)).flatten(0, 1)
        moved = [channels_first(way, value.shape) for way in ways]
        columns = torch.stack([before(value + way) - base for way in moved], 1)
        solved = torch.linalg.lstsq(columns, (wanted - base)[:, None], driver="gelsd")
        if int(solved.rank) < len(moved):
            return None
        return value + torch.einsum("w,wnchv->nchv", solved.solution[:, 0], torch.stack(moved))


def _without_wrong(equations: Equations, limit: float) -> tuple[Fit, Tensor] | None:
    """The solution without the channels that do not fit it, and which were used; None if too many do not."""
    used = torch.ones(int(equations.channel.max()) + 1, dtype=torch.bool)
    fit = equations.fit(used)
    while fit is not None and fit.residual > limit:
        used[fit.channels.argmax()] = False
        rows = int(used[equations.channel].sum())
        if int((~used).sum()) > _MOST_WRONG or rows < _SPARE * equations.matrix.shape[1]:
            return None
        fit = equations.fit(used)
    return None if fit is None else (fit, used)


def _signal(slope: Tensor, value: Tensor, layer: nn.Conv2d, size: Sequence[int]) -> Tensor:
    """The gradient at the outputs (N, C, *size) of a convolution whose input is known, from that of its weight."""
    assert not isinstance(layer.padding, str)
    patches = F.unfold(value, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    flat: Tensor = slope.flatten(1) @ torch.linalg.pinv(patches.transpose(1, 2).flatten(0, 1))
    return flat.reshape(len(slope), len(value), *size).transpose(0, 1)
