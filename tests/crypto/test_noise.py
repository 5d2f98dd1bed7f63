"""Noise on encrypted means arrives as it was drawn: whatever its size, none is cut off, and too much is an error."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.crypto.noise import chance, recovered
from tests.seeds import replayed

from leaktight.crypto.cipher import Cipher, CipherError, CiphertextError, Keys, Noise, QuantiserOverflowError, Values
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.packing import Slots
from leaktight.crypto.paillier import Paillier

SMALL = Paillier(key_bits=256, unsafe_small=True)
CIPHERS = [SMALL, replace(SMALL, bound=0.03, value_bits=8), Ckks(), Ckks(bound=0.03, ring=16384)]
COUNT = 20_000
WEIGHTS = [600, 250, 150]


@lru_cache(maxsize=16)
def keys_of(cipher: Cipher) -> Keys:
    return cipher.new_keys(replayed(0))


def with_room(cipher: Cipher, spread: float) -> Cipher:
    """The cipher with room for twelve standard deviations of noise."""
    return replace(cipher, noise_bound=12 * spread * cipher.bound)


def noised(cipher: Cipher, noise: Noise) -> tuple[Values, Values]:
    """The mean of three vectors as it is, and as it comes back from encryption with the noise."""
    keys = keys_of(cipher)
    values = [replayed(seed).public_numpy().uniform(-cipher.bound, cipher.bound, len(noise)) for seed in range(3)]
    vectors = [cipher.encrypt(each, keys, rng=replayed(place)) for place, each in enumerate(values)]
    seen = cipher.decrypt(cipher.combine(vectors, WEIGHTS, keys.public, noise=noise), keys.secret)
    return np.average(values, axis=0, weights=WEIGHTS), seen


def drawn(std: float, count: int = COUNT) -> Noise:
    return std * replayed(5).secret().normal(count)


@pytest.mark.parametrize("spread", [0.01, 0.97, 5.9, 300.0])
@pytest.mark.parametrize("cipher", CIPHERS, ids=str)
def test_noise_has_the_variance_and_the_shape_that_was_asked_for(cipher: Cipher, spread: float) -> None:
    """spread: the noise's standard deviation in bounds. The standard error of a deviation is std / sqrt(2 n)."""
    cipher, std = with_room(cipher, spread), spread * cipher.bound
    truth, seen = noised(cipher, drawn(std))
    noise = seen - truth
    assert noise.std() == pytest.approx(std, rel=5 / np.sqrt(2 * COUNT))
    assert abs(noise.mean()) < 5 * std / np.sqrt(COUNT)
    assert abs(stats.kurtosis(noise)) < 5 * np.sqrt(24 / COUNT)  # noise cut off at a sixth of std has -1.8
    assert stats.kstest(noise, "norm", args=(0, std)).pvalue > 1e-4
    assert len(np.unique(seen)) > 0.5 * COUNT  # no two numbers at which values pile up


@pytest.mark.parametrize("spread", [0.97, 5.9])
@pytest.mark.parametrize("cipher", [SMALL, Ckks()], ids=str)
def test_subtracting_a_limit_gives_no_value_back(cipher: Cipher, spread: float) -> None:
    cipher, std = with_room(cipher, spread), spread * cipher.bound
    truth, seen = noised(cipher, drawn(std))
    limits, within = [0.0, cipher.bound, 2 * cipher.bound, cipher.noise_bound], 4 * cipher.resolution
    assert recovered(seen, truth, limits, within=within) <= chance(std, within, COUNT, len(limits) + 1)


def test_the_attacker_finds_what_is_cut_off() -> None:
    """The positive control: noise of 5.9 bounds that is cut off at the bound gives six values of seven back."""
    noise = drawn(5.9)
    truth = replayed(1).public_numpy().uniform(-0.1, 0.1, COUNT)
    assert recovered(truth + np.clip(noise, -1, 1), truth, [1.0], within=1e-6) > 0.84
    assert recovered(truth + noise, truth, [1.0], within=1e-6) <= chance(5.9, 1e-6, COUNT, 2)


@pytest.mark.parametrize("cipher", [SMALL, Ckks()], ids=str)
def test_noise_beyond_its_room_is_an_error_and_not_cut_off(cipher: Cipher) -> None:
    for room, noise, message in [
        (0.0, 1e-9, "expected noise within ±0, got 1e-09"),
        (3.0, 3.001, "expected noise within ±3, got 3.001; raise"),
        (3.0, -3.001, "got 3.001"),
        (3.0, float("nan"), "got nan"),
        (3.0, float("inf"), "got inf"),
    ]:
        with pytest.raises(QuantiserOverflowError, match=message):
            noised(replace(cipher, noise_bound=room), np.array([0.0, noise]))
    truth, seen = noised(replace(cipher, noise_bound=3.0), np.array([3.0, -3.0]))
    assert np.abs(seen - truth - [3, -3]).max() <= 2 * cipher.resolution
    roomy = replace(cipher, noise_bound=3.0)
    vector = roomy.encrypt(np.zeros(5), keys_of(roomy))
    with pytest.raises(CipherError, match="expected noise for 5 values"):
        roomy.combine([vector], [1], keys_of(roomy).public, noise=np.zeros(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(SMALL, noise_bound=-1.0), "noise_bound >= 0"),
        (lambda: replace(SMALL, noise_bound=float("nan")), "noise_bound >= 0"),
        (lambda: replace(SMALL, noise_bound=1e9), r"at most 62 bits together, got 64; lower value_bits"),
        (lambda: Ckks(noise_bound=3e5), "noise of at most 4096 times the bound, got 300000; raise bound"),
    ],
)
def test_room_that_no_cipher_has_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("signs", ["all alike", "mixed"])
@pytest.mark.parametrize("ring", [8192, 16384])
def test_ckks_holds_the_most_noise_that_it_accepts(ring: int, signs: str) -> None:
    """All alike is the worst case: the whole sum is in one coefficient."""
    cipher = Ckks(ring=ring, noise_bound=2.0**12)
    sign = np.ones(ring // 2) if signs == "all alike" else np.sign(drawn(1.0, ring // 2))
    truth, seen = noised(cipher, sign * cipher.noise_bound)
    assert np.abs(seen - truth - sign * cipher.noise_bound).max() <= 2 * cipher.resolution


@pytest.mark.parametrize("cipher", [SMALL, Ckks()], ids=str)
def test_only_what_carries_noise_may_exceed_the_bound(cipher: Cipher) -> None:
    cipher = replace(cipher, noise_bound=50.0)
    keys = keys_of(cipher)
    vector = cipher.encrypt(np.zeros(3), keys)
    total = cipher.combine([vector], [1], keys.public, noise=np.array([40.0, 0.0, -40.0]))
    with pytest.raises(CiphertextError, match="damaged"):
        cipher.decrypt(replace(total, noisy=False), keys.secret)
    with pytest.raises(CiphertextError, match="give all participants the same settings"):
        replace(cipher, noise_bound=51.0).decrypt(total, keys.secret)


def test_the_finest_noise_survives_rounding_and_finer_noise_does_not() -> None:
    cipher = replace(SMALL, value_bits=8, noise_bound=1.0)
    keys = keys_of(cipher)
    for share, kept in [(1.0, True), (0.05, False)]:
        std = share * cipher.finest_noise(1000)
        noise = drawn(std)
        vector = cipher.encrypt(np.zeros(COUNT), keys, rng=replayed(0))
        seen = cipher.decrypt(cipher.combine([vector], [1000], keys.public, noise=noise), keys.secret)
        assert bool(abs(seen.std() / noise.std() - 1) < 0.01) == kept


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 30),
    st.integers(1, 30),
    st.sampled_from([1e-3, 1.0, 77.0]),
    st.floats(0, 1e6),
    st.integers(64, 300),
    st.data(),
)
def test_sums_with_noise_are_packed_and_undone_whatever_the_room(
    value_bits: int, weight_bits: int, bound: float, room: float, capacity: int, data: st.DataObject
) -> None:
    """The largest noise of either sign on values at the bound, in any order: no slot runs over into the next."""
    slots = Slots(value_bits, weight_bits, bound, room * bound, capacity)
    assume(slots.width <= 62 and slots.per_integer > 0)
    weight = data.draw(st.integers(1, 2**weight_bits))
    parts = st.lists(st.floats(-1, 1) | st.sampled_from([-1.0, 1.0]), min_size=1, max_size=40)
    shares = np.array(data.draw(parts))
    values = bound * np.array(data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=40)))
    count = min(len(shares), len(values))
    values, noise = values[:count], room * bound * shares[:count]
    sums = zip(slots.pack(slots.quantise(values)), slots.pack(slots.noise_levels(noise, weight)), strict=True)
    whole = [weight * value + shift for value, shift in sums]
    assert max(whole).bit_length() <= capacity
    result = slots.values(slots.unpack(whole, count), weight=weight, noisy=True)
    off = slots.step / weight + 1e-12 * (bound + room * bound)
    assert np.abs(result - values - noise).max() <= off
