"""A server that scans the seeds of PyTorch's generator explains nothing that a client draws; before, it explained all.

`tests/security/old_scheme.py` is the positive control: every scene is also played as it was before secrets had a key of
their own, and there the scan finds the seed.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.security import scan
from tests.security.old_scheme import restore_old_scheme
from tests.security.scan import ALIKE, DRAWS, WORDS, Sight, chunks, first_words, scan_long, windows
from tests.security.scenes import SCENES, SEED, overhearing
from tests.seeds import replayed

from leaktight.config.catalogue import DEFENSES

WIDTH = 1 << 12
LONG = 1 << 24
SEEDS = (0, 1, 7, 123456789, 2**31, 2**32 - 1)
DRAWS_NOTHING = {"none", "clipping", "compression", "soteria", "adadefense", "percentile_privacy", "stack"}

every_scene = pytest.mark.parametrize("name", SCENES)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_scan_draws_as_pytorch_does() -> None:
    words = first_words(np.array(SEEDS, dtype=np.int64))
    for place, seed in enumerate(SEEDS):
        own = words[:, place : place + 1]
        assert np.array_equal(scan.rand32(own)[:, 0], torch.rand(WORDS, generator=generator(seed)))
        double = torch.rand(DRAWS, generator=generator(seed), dtype=torch.float64)
        assert np.array_equal(scan.rand64(own)[:, 0], double)
        assert np.allclose(scan.randn32(own)[:, 0], torch.randn(WORDS, generator=generator(seed)), atol=1e-6)
        double = torch.randn(DRAWS, generator=generator(seed), dtype=torch.float64)
        assert np.allclose(scan.randn64(own)[:, 0], double, atol=1e-12)
        assert np.allclose(scan.randn_few(own)[:9, 0], torch.randn(9, generator=generator(seed)), atol=1e-6)
        for count in (10, 60, 5000):
            order = torch.randperm(count, generator=generator(seed))
            assert np.array_equal(scan.randperm(count)(own)[:, 0], order[:DRAWS])


def test_pytorch_keeps_32_bits_of_a_seed() -> None:
    long = replayed(SEED).entropy(8) >> 1
    assert torch.equal(torch.rand(5, generator=generator(long)), torch.rand(5, generator=generator(long & 0xFFFFFFFF)))


def test_every_defense_that_draws_has_its_scene() -> None:
    kinds = {name.split(" ")[0] for name in SCENES} - {"batches", "fusion"}
    assert kinds == set(DEFENSES) - DRAWS_NOTHING


@every_scene
def test_no_seed_near_a_known_number_explains_what_was_drawn(name: str) -> None:
    with overhearing() as heard:
        sights = SCENES[name]()
    assert heard.places
    for found in scan.scan(sights, windows(heard.numbers(), WIDTH)).values():
        assert found.correlation < ALIKE


@every_scene
def test_drawn_from_pytorch_everything_was_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restore_old_scheme(monkeypatch)
    with overhearing() as heard:
        sights = SCENES[name]()
    result = scan.scan(sights, windows(heard.numbers(), WIDTH))
    assert any(found.correlation > ALIKE for found in result.values())
    if name == "fedkl":
        assert all(found.correlation > ALIKE for found in result.values())


def test_a_seed_of_the_clock_is_found() -> None:
    now = int(time.time())
    noise = torch.randn(200, generator=generator(now - 1500))
    sights = {"clock": Sight(scan.randn32, noise.numpy() + 0.05 * np.sin(np.arange(200)))}
    found = scan.scan(sights, windows([now], WIDTH))["clock"]
    assert found.seed == now - 1500
    assert found.correlation > ALIKE


@pytest.mark.slow
@pytest.mark.parametrize(
    "middle", [LONG // 2, replayed(SEED).entropy(8), int(time.time())], ids=["zero", "seed", "clock"]
)
def test_no_seed_in_a_long_window_explains_what_was_drawn(middle: int) -> None:
    """Sixteen million seeds; one is planted far from the middle, and found."""
    first = (middle & 0xFFFFFFFF) - LONG // 2
    planted = (first + 12345) & 0xFFFFFFFF
    noise = torch.randn(200, generator=generator(planted)).numpy()
    sights = {"planted": Sight(scan.randn32, noise)}
    for scene in SCENES.values():
        sights |= scene()
    best = scan_long(sights, chunks(first, LONG))
    found = best.pop("planted")
    assert (found.seed, found.correlation > ALIKE) == (planted, True)
    assert max(each.correlation for each in best.values()) < ALIKE
