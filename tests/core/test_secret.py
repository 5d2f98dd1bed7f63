"""Secret draws follow their laws, and equal those of a slow second implementation that shares no code."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from scipy import stats
from torch import Tensor

from leaktight.core.secret import GRID_BITS, Dtype, Numbers, SecretStream, Words, grid_spacing, released

KEY = bytes(range(32))
MANY = 1_000_000
LARGEST: dict[Dtype, float] = {np.float32: math.sqrt(2 * 31 * math.log(2)), np.float64: math.sqrt(2 * 63 * math.log(2))}
STD = 0.3

both_types = pytest.mark.parametrize("dtype", LARGEST)


def stream(number: int = 0) -> SecretStream:
    return SecretStream(bytes([number]) + KEY[1:])


class Fixed(SecretStream):
    """A stream whose keystream is the same word for ever."""

    def __init__(self, word: int) -> None:
        super().__init__(KEY)
        self.word = word

    def _words(self, count: int, word: np.dtype[np.signedinteger]) -> Words:
        return np.full(count, self.word, word)


# The slow second implementation: AES of a counter, and Python's own floats.


def keystream(count: int) -> bytes:
    """AES in counter mode by hand."""
    blocks = b"".join(number.to_bytes(16, "big") for number in range(count // 16 + 1))
    return Cipher(AES256(KEY), ECB()).encryptor().update(blocks)[:count]


def words(count: int, dtype: Dtype) -> list[int]:
    letter, size = ("i", 4) if dtype is np.float32 else ("q", 8)
    return list(struct.unpack(f"<{count}{letter}", keystream(size * count)))


def open_unit(word: int, bits: int) -> float:
    return float((word % 2**bits) | 1) / 2.0**bits


def slow_normal(count: int, dtype: Dtype) -> list[float]:
    bits, drawn = (31 if dtype is np.float32 else 63), words(count, dtype)
    radii = [math.sqrt(-2 * math.log(open_unit(word, bits))) for word in drawn[: count // 2]]
    angles = [word * math.pi / 2**bits for word in drawn[count // 2 :]]
    pairs = list(zip(radii, angles, strict=True))
    return [r * math.cos(a) for r, a in pairs] + [r * math.sin(a) for r, a in pairs]


def slow_exponential(count: int, dtype: Dtype) -> list[float]:
    bits = 31 if dtype is np.float32 else 63
    return [-math.log(open_unit(word, bits)) for word in words(count, dtype)]


def slow_laplace(count: int, dtype: Dtype) -> list[float]:
    both = slow_exponential(2 * count, dtype)
    return [(minus - plus) / math.sqrt(2) for plus, minus in zip(both[:count], both[count:], strict=True)]


def slow_uniform(count: int, dtype: Dtype) -> list[float]:
    bits, kept = (32, 24) if dtype is np.float32 else (64, 53)
    return [((word % 2**bits) >> (bits - kept)) / 2**kept for word in words(count, dtype)]


SLOW: dict[str, Callable[[int, Dtype], list[float]]] = {
    "normal": slow_normal,
    "exponential": slow_exponential,
    "laplace": slow_laplace,
    "uniform": slow_uniform,
}


@both_types
@pytest.mark.parametrize("law", SLOW)
def test_the_first_draws_are_those_of_a_slow_second_implementation(law: str, dtype: Dtype) -> None:
    drawn = getattr(SecretStream(KEY), law)(100, dtype)
    assert drawn.dtype == dtype
    rounding = 64 * np.finfo(dtype).eps
    assert np.allclose(drawn, np.array(SLOW[law](100, dtype)), rtol=rounding, atol=rounding)


def test_bytes_are_the_keystream_and_a_permutation_sorts_it() -> None:
    assert SecretStream(KEY).bytes(1000) == keystream(1000)
    drawn = words(100, np.float64)
    assert SecretStream(KEY).permutation(100).tolist() == sorted(range(100), key=drawn.__getitem__)


def test_every_number_is_given_out_once() -> None:
    mixed = SecretStream(KEY)
    parts = [mixed.uniform(7), mixed.uniform(1), mixed.uniform(12)]
    assert np.array_equal(np.concatenate(parts), SecretStream(KEY).uniform(20))
    first, second = mixed.normal(1000), mixed.normal(1000)
    assert not np.intersect1d(first, second).size


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a key of 32 bytes, got 4"):
        SecretStream(b"1234")


def assert_moments(drawn: Numbers, expected: tuple[float, float, float, float]) -> None:
    """The first four moments, each within five standard errors."""
    values = drawn.astype(np.float64)
    for power, moment in enumerate(expected, 1):
        sample = values**power
        assert abs(sample.mean() - moment) < 5 * sample.std() / math.sqrt(len(values)), power


@both_types
def test_normal_draws_have_the_moments_and_the_distribution_of_the_law(dtype: Dtype) -> None:
    drawn = stream().normal(MANY, dtype)
    assert_moments(drawn, (0.0, 1.0, 0.0, 3.0))
    assert stats.kstest(drawn[: MANY // 4], "norm").pvalue > 1e-3
    assert len(np.unique(drawn)) > 0.9 * MANY


@both_types
def test_laplace_draws_have_the_moments_and_the_distribution_of_the_law(dtype: Dtype) -> None:
    drawn = stream(1).laplace(MANY, dtype)
    assert_moments(drawn, (0.0, 1.0, 0.0, 6.0))
    assert stats.kstest(drawn[: MANY // 4], stats.laplace(scale=math.sqrt(0.5)).cdf).pvalue > 1e-3


@both_types
def test_other_laws(dtype: Dtype) -> None:
    uniform = stream(2).uniform(MANY, dtype)
    assert 0 <= uniform.min() < 1e-4 < 1 - 1e-4 < uniform.max() < 1
    assert stats.kstest(uniform[: MANY // 4], "uniform").pvalue > 1e-3
    assert stats.kstest(stream(3).exponential(MANY // 4, dtype), "expon").pvalue > 1e-3


@both_types
def test_the_largest_normal_number_lies_beyond_six_standard_deviations(dtype: Dtype) -> None:
    """The word 0 gives the largest radius and the angle 0."""
    largest = float(Fixed(0).normal(2, dtype)[0])
    assert largest == pytest.approx(LARGEST[dtype], rel=1e-6)
    assert largest > 6
    assert np.isfinite(Fixed(-1).normal(2, dtype)).all()
    assert np.isfinite(Fixed(0).laplace(2, dtype)).all()


def test_what_lies_beyond_the_largest_number_is_too_little_to_matter() -> None:
    """For a billion elements, with delta = 1e-5; 24 bits would lose a share of 8e-9 of them."""
    assert 1e9 * 2 * stats.norm.sf(LARGEST[np.float64]) < 1e-10
    assert 1e6 * 2 * stats.norm.sf(math.sqrt(2 * 24 * math.log(2))) > 1e-3


@both_types
def test_the_tail_has_its_share(dtype: Dtype) -> None:
    beyond, number = 0, 4 * MANY
    source = stream(4)
    for _ in range(4):
        beyond += int((np.abs(source.normal(MANY, dtype)) > 4).sum())
    expected = number * 2 * stats.norm.sf(4)
    assert abs(beyond - expected) < 5 * math.sqrt(expected)


@both_types
def test_neighbours_and_pairs_are_independent(dtype: Dtype) -> None:
    """A radius and an angle make two numbers: half a chunk apart."""
    drawn = stream(5).normal(1 << 16, dtype).astype(np.float64)
    for lag in (1, 2, 8, 16, 1 << 15):
        for change in (lambda values: values, np.abs, np.square):
            left, right = change(drawn[:-lag]), change(drawn[lag:])
            assert abs(np.corrcoef(left, right)[0, 1]) < 5 / math.sqrt(len(left))


def test_permutations_are_even() -> None:
    source = stream(6)
    places = {order: place for place, order in enumerate(permutations(range(4)))}
    counts = np.zeros(len(places))
    for _ in range(200 * len(places)):
        counts[places[tuple(source.permutation(4).tolist())]] += 1
    assert stats.chisquare(counts).pvalue > 1e-3
    landed = np.zeros((20, 20))
    for _ in range(2000):
        landed[np.arange(20), source.permutation(20).numpy()] += 1
    assert stats.chisquare(landed.reshape(-1), ddof=38).pvalue > 1e-3


def test_noise_has_the_shapes_and_types_of_the_tensors() -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(0)}
    for draw in (SecretStream.normal_like, SecretStream.laplace_like):
        drawn = draw(stream(), tensors)
        assert [(name, each.shape, each.dtype) for name, each in drawn.items()] == [
            (name, each.shape, each.dtype) for name, each in tensors.items()
        ]


# What differential privacy lets out.


def spread(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that lie on no grid."""
    return torch.linspace(-1, 1, number, dtype=torch.float64).exp().to(dtype)


def on_grid(values: Tensor, spacing: float) -> bool:
    whole = values.double() / spacing
    return torch.equal(whole, whole.round())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_released_lies_on_one_grid_whatever_the_data(dtype: torch.dtype) -> None:
    spacing = grid_spacing(STD)
    zeros = torch.zeros(1000, dtype=dtype)
    for data in (zeros, zeros + 1 / 3, zeros + 1000 / 3, spread(1000, dtype)):
        out = released({"": data}, STD, stream())[""]
        assert out.dtype == dtype
        assert on_grid(out, spacing)
    plain = spread(1000) + STD * stream().normal_like({"": spread(1000)})[""]
    assert not on_grid(plain, spacing)


def test_the_grid_belongs_to_the_noise() -> None:
    for noise_std in (1e-6, 0.3, 0.5, 1.0, 7.0, 1e5):
        spacing = grid_spacing(noise_std)
        assert noise_std / 2 < spacing * 2**GRID_BITS <= noise_std
        assert math.frexp(spacing)[0] == 0.5
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected noise_std > 0"):
            grid_spacing(wrong)


def guessed_zero(values: Tensor) -> float:
    """How often Mironov's attacker takes the datum for 0 rather than 1: no sum with 1 has such fine last digits."""
    return float((values.double() % 2.0**-24 != 0).double().mean())


def test_last_digits_tell_the_data_apart_in_plain_noise_and_not_in_what_is_released() -> None:
    for data, told in ((torch.zeros(1000), True), (torch.ones(1000), False)):
        noise = 0.01 * stream().normal_like({"": data})[""]
        assert (guessed_zero(data + noise) > 0.5) is told
        assert guessed_zero(released({"": data}, 0.01, stream())[""]) == 0


def test_last_digits_of_what_is_released_are_even() -> None:
    for data in (torch.zeros(200_000), spread(200_000)):
        whole = (released({"": data}, STD, stream(7))[""].double() / grid_spacing(STD)).long()
        assert stats.chisquare(np.bincount(whole.numpy() % 16, minlength=16)).pvalue > 1e-3


def test_what_is_released_is_the_data_with_noise_of_the_stated_size() -> None:
    tensors = {"a": spread(150_000).view(3, -1), "b": torch.full((7,), 5.0, dtype=torch.float64), "c": torch.zeros(0)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    out = released(tensors, STD, stream(8))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
    assert [(each.shape, each.dtype) for each in out.values()] == [(e.shape, e.dtype) for e in tensors.values()]
    noise = ((out["a"] - tensors["a"]).reshape(-1) / STD).numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    assert_moments(noise, (0.0, 1.0, 0.0, 3.0))
    assert torch.equal(released(tensors, STD, stream(8))["a"], out["a"])
    drawn = stream(8).normal(150_007)[: 1 << 16]
    assert np.allclose(noise[: 1 << 16], drawn, atol=2.0**-12)
