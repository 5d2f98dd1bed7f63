"""Against PRECODE: the noise of the bottleneck is searched for, and its gradients need not be matched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leaktight.adaptive.knowing import Adaptation, labels_from_bias, without
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Unknown, View
from leaktight.core.errors import require_at_least
from leaktight.core.types import Observation
from leaktight.models.bottleneck import VariationalBottleneck


class GivenNoise(VariationalBottleneck):
    """A bottleneck whose noise is a buffer, (N, K) or (1, K), and not drawn."""

    noise: Tensor

    def __init__(self, drawn: VariationalBottleneck, noise: Tensor) -> None:
        nn.Module.__init__(self)
        self.encoder, self.decoder, self._divergence = drawn.encoder, drawn.decoder, None
        self.register_buffer("noise", noise)

    def draw(self, like: Tensor) -> Tensor:
        return self.noise.expand_as(like)


@dataclass(frozen=True, kw_only=True)
class KnowsPrecode(Adaptation):
    """PRECODE: the noise of every example is searched for with its image; the bottleneck's gradients are left out.

    ignore_bottleneck: do not match the gradients of encoder and decoder.
    spread: standard deviation of the first noise, around zero, >= 0; the client's has 1.

    With the right noise the gradients of the layers before it are those of an ordinary network. Labels that would be
    searched for are read from the bias of the last layer.
    Assumes: the bottleneck's weights, which are public. Cannot: search for separate noise in each of several local
    steps; all steps and examples then share one unknown noise vector.
    """

    ignore_bottleneck: bool = True
    spread: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, spread=self.spread)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return labels_from_bias(attack, seen[0]), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        model = copy.deepcopy(view.trainer.model)
        names = [name for name, module in model.named_modules() if isinstance(module, VariationalBottleneck)]
        like = next(iter(view.params.values()))
        rows = (seen.batch_size or 1) if len(view.steps) < 2 else 1
        buffers: dict[str, Tensor] = {}
        for name in names:
            drawn = model.get_submodule(name)
            assert isinstance(drawn, VariationalBottleneck)
            noise = torch.zeros(rows, drawn.decoder.in_features, dtype=like.dtype)
            model.set_submodule(name, GivenNoise(drawn, noise))
            buffers[f"{name}.noise"] = noise
        view = replace(
            view,
            trainer=replace(view.trainer, model=model),
            buffers={**view.buffers, **buffers},
            unknowns={**view.unknowns, **{name: Unknown(start, self.spread) for name, start in buffers.items()}},
            notes=(*view.notes, "the bottleneck's noise is unknown"),
        )
        if not self.ignore_bottleneck:
            return view
        own = [name for name in view.target if any(name.startswith(f"{each}.") for each in names)]
        return without(view, own, "the bottleneck's gradients are not matched")
