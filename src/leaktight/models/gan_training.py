"""Training of a small generator: DCGAN, or a Wasserstein GAN with gradient penalty, on images in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, UsageError, require_at_least
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng, global_seed
from leaktight.models.gan import DcganNetwork
from leaktight.models.source import require_choice
from leaktight.runtime.processes import one_thread

GanKind: TypeAlias = Literal["dcgan", "wgan_gp"]
AfterEpoch: TypeAlias = Callable[[int, float, float], None]
"""Called after every epoch with its number and the mean losses of critic and generator."""

_LARGEST_START = 7  # sides are halved until they are no longer than this
_STATISTICS_BATCHES = 32
_PENALTY = 10.0
_CRITIC_STEPS: Mapping[str, int] = {
    "dcgan": 3000,
    "wgan_gp": 9000,
}  # wgan_gp's generator takes a third


@dataclass(frozen=True, kw_only=True)
class GanTraining:
    """Settings of the training of a generator.

    kind: "dcgan", with a classifier of real and generated images (Radford et al. 2016), or "wgan_gp", with a critic
    whose gradient has a norm near 1 (Gulrajani et al. 2017), which takes longer and seldom collapses.
    epochs: passes over the images; None: enough for 3000 steps of the generator.
    width: channels of the last hidden layer; each layer before has twice as many. latent: the length of a latent.
    learning_rate: of Adam, for both networks.
    average: in [0, 1); the result is a running mean of the weights over about 1 / (1 - average) steps.
    """

    kind: GanKind = "dcgan"
    epochs: int | None = None
    batch_size: int = 32
    latent: int = 64
    width: int = 32
    learning_rate: float = 2e-4
    average: float = 0.99

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, get_args(GanKind))
        require_at_least(1, epochs=self.epochs, latent=self.latent, width=self.width)
        require_at_least(2, batch_size=self.batch_size)
        if not self.learning_rate > 0:
            raise ValueError(f"expected learning_rate > 0, got {self.learning_rate}")
        if not 0 <= self.average < 1:
            raise ValueError(f"expected average in [0, 1), got {self.average}")

    def num_epochs(self, num_images: int) -> int:
        """The number of passes over `num_images` images."""
        return self.epochs or math.ceil(_CRITIC_STEPS[self.kind] / math.ceil(num_images / self.batch_size))

    def widths(self, inputs: Images) -> list[int]:
        """The channels of a generator of such images."""
        doublings = 1
        while min(inputs.shape[1:]) / 2**doublings > _LARGEST_START:
            doublings += 1
        return [self.width * 2**place for place in reversed(range(doublings))]

    def train(
        self, images: Tensor, *, rng: Rng, after_epoch: AfterEpoch = lambda epoch, critic, generator: None
    ) -> nn.Module:
        """A generator of images like these, bytes (N, C, H, W), on one thread. Repeatable with the same `rng`."""
        if len(images) < 2:
            raise UsageError(f"expected at least 2 images to train on, got {len(images)}; choose a larger set")
        inputs = Images(*images.shape[1:])
        if min(inputs.shape[1:]) < 8:
            raise UsageError(f"expected images of at least 8x8 pixels, got {inputs.height}x{inputs.width}")
        with one_thread():
            return _Networks(self, inputs, rng).run(images, after_epoch)


class _Networks:
    """Generator and critic with their optimisers, and the running mean of the generator."""

    def __init__(self, settings: GanTraining, inputs: Images, rng: Rng) -> None:
        self.settings, self.rng = settings, rng
        widths = settings.widths(inputs)
        with global_seed(rng.child("build")):
            self.generator = DcganNetwork(settings.latent, widths, inputs)
            self.mean = DcganNetwork(settings.latent, widths, inputs)
            self.critic = _critic(widths, inputs, normed=settings.kind == "dcgan")
            if settings.kind == "dcgan":
                _redraw(self.generator, self.critic)
        self.mean.load_state_dict(self.generator.state_dict())
        self.draws = rng.child("latents").public()
        betas = (0.5, 0.999) if settings.kind == "dcgan" else (0.0, 0.9)
        self.optimizers = {
            network: torch.optim.Adam(network.parameters(), settings.learning_rate, betas)
            for network in (self.generator, self.critic)
        }

    def run(self, images: Tensor, after_epoch: AfterEpoch) -> nn.Module:
        size = min(self.settings.batch_size, len(images))
        for epoch in range(self.settings.num_epochs(len(images))):
            order = torch.randperm(len(images), generator=self.rng.child("epoch", epoch).public())
            losses = [
                _STEP_FUNCTIONS[self.settings.kind](self, images[places].float() / 127.5 - 1, number)
                for number, places in enumerate(order.split(size))
                if len(places) > 1
            ]
            critic, generator = torch.tensor(losses).mean(0).tolist()
            if not torch.isfinite(torch.tensor([critic, generator])).all():
                raise LeaktightError(f"training diverged in epoch {epoch + 1}; try kind wgan_gp or another seed")
            after_epoch(epoch + 1, critic, generator)
        self._set_statistics(size)
        return self.mean.eval().requires_grad_(False)

    def latents(self, count: int) -> Tensor:
        return torch.randn(count, self.settings.latent, generator=self.draws)

    def step(self, network: nn.Module, loss: Tensor) -> float:
        """Take an optimiser step of one network; after the generator's, update its running mean."""
        optimizer = self.optimizers[network]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if network is self.generator:
            with torch.no_grad():
                for mean, now in zip(self.mean.parameters(), self.generator.parameters(), strict=True):
                    mean.lerp_(now, 1 - self.settings.average)
        return float(loss.detach())

    def _set_statistics(self, size: int) -> None:
        """Compute the batch-norm statistics of the mean generator, which training does not."""
        norms = [module for module in self.mean.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all later batches
        with torch.no_grad():
            for _ in range(_STATISTICS_BATCHES):
                self.mean.train()(self.latents(max(size, 16)))


def _dcgan_step(networks: _Networks, real: Tensor, number: int) -> tuple[float, float]:
    """One step of each network of a DCGAN."""
    made = networks.generator(networks.latents(len(real)))
    on_real, on_made = networks.critic(real), networks.critic(made.detach())
    critic = networks.step(networks.critic, F.softplus(-on_real).mean() + F.softplus(on_made).mean())
    with _frozen(networks.critic):
        return critic, networks.step(networks.generator, F.softplus(-networks.critic(made)).mean())


def _wgan_step(networks: _Networks, real: Tensor, number: int) -> tuple[float, float]:
    """One step of the critic of a WGAN-GP, and every third time one of its generator."""
    with torch.no_grad():
        made = networks.generator(networks.latents(len(real)))
    between = torch.rand(len(real), 1, 1, 1, generator=networks.draws)
    mixed = torch.lerp(real, made, between).requires_grad_()
    (slope,) = torch.autograd.grad(networks.critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    distance = networks.critic(made).mean() - networks.critic(real).mean()
    critic = networks.step(networks.critic, distance + _PENALTY * penalty)
    with _frozen(networks.critic):
        loss = -networks.critic(networks.generator(networks.latents(len(real)))).mean()
        return critic, networks.step(networks.generator, loss) if number % 3 == 0 else float(loss.detach())


_STEP_FUNCTIONS: Mapping[str, Callable[[_Networks, Tensor, int], tuple[float, float]]] = {
    "dcgan": _dcgan_step,
    "wgan_gp": _wgan_step,
}


def _critic(widths: list[int], inputs: Images, normed: bool) -> nn.Module:
    """The mirror image of the generator: images (N, C, H, W) to scores (N, 1)."""
    layers: list[nn.Module] = []
    channels = inputs.channels
    for place, width in enumerate(reversed(widths)):
        layers.append(nn.Conv2d(channels, width, 4, stride=2, padding=1))
        layers += [nn.BatchNorm2d(width)] if normed and place else []
        layers.append(nn.LeakyReLU(0.2))
        channels = width
    sides = [side // 2 ** len(widths) for side in inputs.shape[1:]]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 1))


def _redraw(*networks: nn.Module) -> None:
    """Draw DCGAN's initial weights, N(0, 0.02^2), from PyTorch's global generator.

    Not for a critic without batch norm, which would hardly learn from there.
    """
    for network in networks:
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.02)


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Compute no gradients of a network's weights inside the block."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)
