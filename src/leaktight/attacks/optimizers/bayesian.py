"""Bayesian optimisation in a trust region: a Gaussian process predicts where the loss is lower."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, qmc
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from leaktight.attacks.optimizers.derivative_free import DerivativeFree, Dialogue, Points
from leaktight.core.errors import require_above, require_at_least
from leaktight.core.rng import Rng

_LONGEST, _FIRST, _SHORTEST = (
    1.6,
    0.8,
    0.5**7,
)  # sides of the region, as in TuRBO
_SUCCESSES = 3  # in a row, before the region grows
_MOVED = 20  # approximate number of coordinates in which a proposal differs from the best point


@dataclass(frozen=True, kw_only=True)
class Bayesian(DerivativeFree):
    """TuRBO-1: points are chosen by expected improvement in a region around the best one, which grows and shrinks.

    box: every coordinate is in [-box, box], > 0. first: points before the process is fitted. batch: points in an
    iteration. memory: how many of the points nearest to the best the process is fitted to; the time of a fit grows with
    the cube of it. proposals: points from which each batch is chosen. All of these are >= 2.
    Reference: Eriksson et al., Scalable Global Optimization via Local Bayesian Optimization, NeurIPS 2019.
    Differs from the paper: expected improvement in place of Thompson sampling; one length scale for all coordinates.
    """

    box: float = 2.0
    first: int = 256
    batch: int = 10
    memory: int = 256
    proposals: int = 1000

    def __post_init__(self) -> None:
        require_above(0, box=self.box)
        require_at_least(2, first=self.first, batch=self.batch, memory=self.memory, proposals=self.proposals)

    @property
    def steps_per_iteration(self) -> int:
        return self.batch

    def begin(self, start: Points, *, rng: Rng) -> Dialogue:
        return _Region(self, len(start), rng)


class _Region(Dialogue):
    """The trust region; its points are kept in the unit cube."""

    def __init__(self, settings: Bayesian, size: int, rng: Rng) -> None:
        self.settings, self.size = settings, size
        self.draws = rng.child("proposals").public_numpy()
        self.begin = qmc.LatinHypercube(size, seed=rng.child("first").public_numpy()).random(settings.first)
        self.points, self.losses = np.empty((0, size)), np.empty(0)
        self.patience = max(4.0 / settings.batch, size / settings.batch)
        self._reset()

    def _reset(self) -> None:
        self.side, self.successes, self.failures = _FIRST, 0, 0

    def ask(self) -> Points:
        chosen = self.begin if not len(self.points) else self._promising()
        return (2 * chosen - 1) * self.settings.box

    def tell(self, points: Points, losses: Points) -> None:
        if len(self.points):
            self._judge(bool(losses.min() < self.losses.min() - 1e-3 * abs(self.losses.min())))
        self.points = np.concatenate([self.points, (points / self.settings.box + 1) / 2])
        self.losses = np.concatenate([self.losses, losses])

    def _judge(self, better: bool) -> None:
        """Grow the region after several successes in a row, shrink it after several failures."""
        self.successes, self.failures = (self.successes + 1, 0) if better else (0, self.failures + 1)
        if self.successes >= _SUCCESSES:
            self.side, self.successes = min(2 * self.side, _LONGEST), 0
        elif self.failures >= self.patience:
            self.side, self.failures = self.side / 2, 0
        if self.side < _SHORTEST:
            self._reset()

    def _promising(self) -> Points:
        """The proposals with the greatest expected improvement."""
        best = self.points[self.losses.argmin()]
        near = np.argsort(np.square(self.points - best).sum(1), kind="stable")[: self.settings.memory]
        values = self.losses[near]
        spread = float(values.std()) or 1.0
        shape = (self.settings.proposals, self.size)
        moved = self.draws.random(shape) < min(1.0, _MOVED / self.size)
        moved[np.arange(len(moved)), self.draws.integers(self.size, size=len(moved))] = True
        steps = (self.draws.random(shape) - 0.5) * self.side
        proposals = np.clip(np.where(moved, best + steps, best), 0, 1)
        kernel = ConstantKernel() * Matern(length_scale=1.0, nu=2.5) + WhiteKernel(1e-3)
        process = GaussianProcessRegressor(kernel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a kernel parameter is at its bound: harmless
            process.fit(self.points[near], (values - values.mean()) / spread)
        mean, deviation = process.predict(proposals, return_std=True)
        gain = (values.min() - values.mean()) / spread - mean
        ratio = gain / np.maximum(deviation, 1e-12)
        improvement = gain * norm.cdf(ratio) + deviation * norm.pdf(ratio)
        return np.asarray(proposals[np.argsort(-improvement, kind="stable")[: self.settings.batch]])
