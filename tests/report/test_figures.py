from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from leaktight.report.figures import AccuracyCurve, Boundary, Points, plot_accuracy_curves, plot_boundaries


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(int(level) for level in pixel) for pixel in np.unique(pixels, axis=0)}


def test_a_panel_for_each_method_and_test_set(tmp_path: Path) -> None:
    one = AccuracyCurve("1E16B", [1, 2, 3], [0.1, 0.5, 0.7])
    two = AccuracyCurve("3E16B", [3], [0.6])
    plot_accuracy_curves({"FedAvg": {"made": [one]}}, tmp_path / "one.png", across="rounds")
    grid = {"FedAvg": {"made": [one, two], "real": [one]}, "FedBoosting": {"made": [two]}}
    plot_accuracy_curves(grid, tmp_path / "grid.png", across="rounds")
    small, large = (Image.open(tmp_path / name).size for name in ("one.png", "grid.png"))
    assert large[0] == 2 * small[0]
    assert large[1] > 1.5 * small[1]
    blue, orange = (0x0B, 0x5F, 0xA5), (0xB3, 0x54, 0x1E)
    assert blue in colours(tmp_path / "one.png")
    assert orange not in colours(tmp_path / "one.png")
    assert {blue, orange} <= colours(tmp_path / "grid.png")


def test_a_later_row_is_not_cut_off_by_an_earlier_one(tmp_path: Path) -> None:
    low, high = (AccuracyCurve("1E16B", [1, 2, 3], [level, level, level]) for level in (0.1, 0.9))
    plot_accuracy_curves({"low": {"made": [low]}, "high": {"made": [high]}}, tmp_path / "rows.png", across="rounds")
    pixels = np.asarray(Image.open(tmp_path / "rows.png").convert("RGB"))
    below = pixels[len(pixels) // 2 :]
    assert (below == (0x0B, 0x5F, 0xA5)).all(-1).sum() > 100


def test_boundaries_and_points_are_drawn(tmp_path: Path) -> None:
    rows, columns = np.mgrid[-1:1:40j, -1:1:40j].astype(np.float32)
    models = [Boundary("up", (rows > 0).astype(np.float32)), Boundary("right", (columns > 0).astype(np.float32))]
    points = Points("points", np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32), np.arange(50) % 2)
    plot_boundaries(models, [points], 4.0, tmp_path / "both.png")
    plot_boundaries(models[:1], [points], 4.0, tmp_path / "one.png")
    both, one = (np.asarray(Image.open(tmp_path / name)) for name in ("both.png", "one.png"))
    assert both.shape[1] == 2 * one.shape[1]
    assert len(np.unique(one.reshape(-1, one.shape[2]), axis=0)) > 50
