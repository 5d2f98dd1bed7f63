"""Cocktail Party: the inputs of a linear layer, unmixed from its gradient by independent component analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.attacks.exact.analytic import answer, gradient_of, only, precise
from leaktight.attacks.exact.first_layer import FirstLayer, first_linear, labels_of_inputs
from leaktight.attacks.exact.spear import PROVEN, Mixed, Spear, solve
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.core.errors import require_above, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction
from leaktight.models.surgery import batch_statistics, layer_inputs, mode_of

Tell = Callable[[int, float], None]


def _silent(iteration: int, loss: float) -> None:
    """Losses that are not those of the guess."""


_GAUSSIAN = 0.375
"""The mean of log cosh of a Gaussian variable, about."""


@dataclass(frozen=True, kw_only=True)
class CocktailParty(Attack):
    """Cocktail Party: a batch unmixed from the gradient of the first linear layer by independent component analysis.

    Every row of that gradient is a mixture of the inputs. They are found as components that are far from Gaussian,
    smooth if they are images, and unlike each other. The gradient of the bias gives their sign and scale. Before a ReLU
    they are found exactly, as in `spear`. Behind convolutions they are features, and images are sought that have them.
    iterations, learning_rate: of Adam on the unmixing. smooth: weight of total variation on images (0: none).
    apart: weight of the decorrelation. sharpness: factor in its exponent.
    invert_iterations: of L-BFGS on images behind convolutions. invert_smooth: weight of total variation there.

    Assumes: one local step of plain gradient descent on one batch of fewer examples than the layer has units.
    Cannot: prove its guess. Unmixing is approximate: images show traces of each other, the more the larger the batch.
    Behind convolutions it needs a ReLU after the layer; features before a sigmoid or tanh are not told apart.
    Reference: Kariyappa et al., Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning using
    Independent Component Analysis, ICML 2023.
    Differs from it: sign and scale from the gradient of the bias instead of both signs and a rescaled range; features
    are compared by their squared error, relative to a grey image, instead of their cosine.
    """

    iterations: int = 400
    learning_rate: float = 0.03
    smooth: float = 4.0
    apart: float = 0.1
    sharpness: float = 8.0
    invert_iterations: int = 300
    invert_smooth: float = 1e-2

    def __post_init__(self) -> None:
        require_at_least(1, iterations=self.iterations, invert_iterations=self.invert_iterations)
        require_at_least(0, smooth=self.smooth, apart=self.apart, invert_smooth=self.invert_smooth)
        require_above(0, learning_rate=self.learning_rate, sharpness=self.sharpness)

    @property
    def labels_from(self) -> LabelSource:
        return "inferred"

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        gradient = gradient_of(one)
        first = first_linear(one, gradient)
        mixed = Mixed.of(first, one.batch_size)
        history: list[tuple[int, float]] = []

        def tell(iteration: int, loss: float) -> None:
            history.append((iteration, loss))
            if progress is not None:
                progress(iteration, loss, None)

        shares = self._exact(one, first, mixed, rng)
        if shares is None:
            shape = one.inputs.shape if first.pixels is not None else None
            shares = self._unmixed(mixed, shape, rng, tell if first.pixels is not None else _silent)
        inputs = shares @ mixed.right
        images = first.pixels.pixels(inputs) if first.pixels is not None else self._inverted(one, first, inputs, tell)
        made = answer(images, labels_of_inputs(one, gradient, images), 0.0, {"assumed": list(gradient.notes)})
        first_loss, loss = (history[0][1], history[-1][1]) if history else (0.0, 0.0)
        return Reconstruction(made.guess, loss, made.notes, first_loss=first_loss, history=tuple(history))

    def _exact(self, seen: Observation, first: FirstLayer, mixed: Mixed, rng: Rng) -> Tensor | None:
        """The shares of `mixed.right` in each input by `spear`; None unless they are proven."""
        if not first.gated(seen):
            return None
        found = solve(mixed, Spear(), rng.child("exact"), lambda turn, loss: None)
        return found.shares if found.figure >= PROVEN else None

    def _unmixed(self, mixed: Mixed, shape: Sequence[int] | None, rng: Rng, tell: Tell) -> Tensor:
        """The shares by independent component analysis. shape: that of an image; None if inputs are features."""
        right = mixed.right.float()
        centred = mixed.left @ (mixed.right - mixed.right.mean(1, keepdim=True))
        turn, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
        size = len(right)
        scale = (right.shape[1] - 1) ** 0.5 / sizes[:size].clamp_min(1e-12 * float(sizes[0]))
        whiten = ((turn[:, :size] * scale).T @ mixed.left).float()
        white = whiten @ (right - right.mean(1, keepdim=True))
        mixing = torch.linalg.qr(torch.randn(size, size, generator=rng.public())).Q.clone().requires_grad_()
        optimizer = torch.optim.Adam([mixing], lr=self.learning_rate)
        with torch.enable_grad():
            for iteration in range(self.iterations):
                loss = self._loss(F.normalize(mixing), white, shape)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if iteration % 50 == 0 or iteration == self.iterations - 1:
                    tell(iteration, float(loss.detach()))
        return mixed.scaled((F.normalize(mixing.detach()) @ whiten).double())

    def _loss(self, mixing: Tensor, white: Tensor, shape: Sequence[int] | None) -> Tensor:
        """Components near to Gaussian, rough, or alike cost more."""
        parts = mixing @ white
        log_cosh = parts.abs() + F.softplus(-2 * parts.abs()) - 0.6931471805599453
        loss = -(log_cosh.mean(1) - _GAUSSIAN).square().mean()
        alike = ((self.sharpness * (mixing @ mixing.T).abs()).exp() - 1) * (1 - torch.eye(len(mixing)))
        loss = loss + self.apart * alike.mean()
        if shape is not None:
            loss = loss + self.smooth * TotalVariation().penalty(parts.reshape(-1, *shape))
        return loss

    def _inverted(self, seen: Observation, first: FirstLayer, features: Tensor, tell: Tell) -> Tensor:
        """Images (N, C, H, W) whose input of the first linear layer is `features` (N, n)."""
        mode = seen.mode or "train"
        model = batch_statistics(seen.model) if mode == "train" else seen.model
        tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in precise(seen).items()
        }
        logits = torch.zeros(len(features), *seen.inputs.shape, requires_grad=True)

        def seen_as(images: Tensor) -> Tensor:
            return dict(layer_inputs(model, tensors, {}, images, (nn.Linear,)))[first.name].flatten(1)

        with torch.enable_grad(), mode_of(model, mode):
            grey = seen_as(logits.detach().sigmoid())
            wanted = features.float() - grey
            size = wanted.square().sum(1).clamp_min(1e-12)

            def loss() -> Tensor:
                images = logits.sigmoid()
                far = (seen_as(images) - grey - wanted).square().sum(1) / size
                return far.sum() + self.invert_smooth * TotalVariation().penalty(images) * len(images)

            def closure() -> float:
                optimizer.zero_grad()
                found = loss()
                found.backward()
                return float(found.detach())

            optimizer = torch.optim.LBFGS([logits], max_iter=50, history_size=20, line_search_fn="strong_wolfe")
            with torch.no_grad():
                logits += 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
            for turn in range(0, self.invert_iterations, 50):
                tell(turn, float(optimizer.step(closure)))
            tell(self.invert_iterations, float(loss().detach()))
        return logits.detach().sigmoid().double()
