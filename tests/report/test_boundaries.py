from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from leaktight.report.boundaries import Boundary, Points, plot_boundaries


def test_boundaries_and_points_are_drawn(tmp_path: Path) -> None:
    rows, columns = np.mgrid[-1:1:40j, -1:1:40j].astype(np.float32)
    models = [Boundary("up", (rows > 0).astype(np.float32)), Boundary("right", (columns > 0).astype(np.float32))]
    points = Points("points", np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32), np.arange(50) % 2)
    plot_boundaries(models, [points], 4.0, tmp_path / "both.png")
    plot_boundaries(models[:1], [points], 4.0, tmp_path / "one.png")
    both, one = (np.asarray(Image.open(tmp_path / name)) for name in ("both.png", "one.png"))
    assert both.shape[1] == 2 * one.shape[1]
    assert len(np.unique(one.reshape(-1, one.shape[2]), axis=0)) > 50
