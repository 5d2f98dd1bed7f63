"""What every cipher promises: means as in the open, and errors that say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.seeds import replayed

from leaktight.core.errors import LeaktightError
from leaktight.core.tensors import pack, unpack
from leaktight.crypto import seal
from leaktight.crypto.cipher import (
    Body,
    Cipher,
    CipherError,
    CiphertextError,
    Keys,
    QuantiserOverflowError,
    Sealed,
    Values,
    WrongKeyError,
    integer_weights,
)
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.packing import Slots
from leaktight.crypto.paillier import Paillier

SMALL = Paillier(key_bits=256, unsafe_small=True)
CIPHERS = [SMALL, Ckks()]


@lru_cache(maxsize=16)
def keys_of(cipher: Cipher, seed: int = 0) -> Keys:
    return cipher.new_keys(replayed(seed))


def numbers(count: int, bound: float = 1.0, seed: int = 0) -> Values:
    return np.random.default_rng(seed).uniform(-bound, bound, count)


def sealed_by(cipher: Cipher, values: Values, seed: int = 0) -> Sealed:
    return cipher.encrypt(values, keys_of(cipher), rng=replayed(seed))


quiet = st.builds(
    Paillier,
    key_bits=st.sampled_from([128, 192, 256]),
    value_bits=st.integers(2, 30),
    weight_bits=st.integers(1, 30),
    bound=st.sampled_from([1e-3, 1.0, 77.0]),
    unsafe_small=st.just(True),
)


@st.composite
def paillier(draw: st.DrawFn) -> Paillier:
    """Ciphers with room for noise of 0 to 77 bounds, as far as a slot of 62 bits has it."""
    cipher, share = draw(quiet), draw(st.sampled_from([0.0, 1e-3, 1.0, 77.0]))
    assume(replace(cipher.slots, noise_bound=share * cipher.bound).width <= 62)
    return replace(cipher, noise_bound=share * cipher.bound)


@settings(max_examples=60, deadline=None)
@given(paillier(), st.data())
def test_a_packed_mean_is_exact_up_to_the_step(cipher: Paillier, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, min(6, cipher.most_weight)))
    count = data.draw(st.integers(1, 40))
    weights = data.draw(st.lists(st.integers(0, cipher.most_weight // clients), min_size=clients, max_size=clients))
    assume(sum(weights) > 0)
    values = [numbers(count, cipher.bound, seed) for seed in range(clients)]
    public, secret = keys_of(cipher).public, keys_of(cipher).secret
    vectors = [cipher.encrypt(each, keys_of(cipher), rng=replayed(place)) for place, each in enumerate(values)]
    mean = cipher.decrypt(cipher.combine(vectors, weights, public), secret)
    expected = np.average(values, axis=0, weights=weights)
    assert np.abs(mean - expected).max() <= cipher.resolution * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(paillier(), st.data())
def test_no_slot_runs_over_at_the_bounds(cipher: Paillier, data: st.DataObject) -> None:
    """The largest weights, values and noise that are allowed, in any order of signs, disturb no neighbour."""
    count = data.draw(st.integers(1, 20))
    signs = st.lists(st.sampled_from([-1.0, 1.0]), min_size=count, max_size=count)
    values, noise = cipher.bound * np.array(data.draw(signs)), cipher.noise_bound * np.array(data.draw(signs))
    noisy = data.draw(st.booleans())
    keys = keys_of(cipher)
    vector = cipher.encrypt(values, keys, rng=replayed(0))
    half = cipher.most_weight // 2
    total = cipher.combine([vector, vector], [half, half], keys.public, noise=noise if noisy else None)
    assert total.weight == cipher.most_weight
    expected, finest = values + (noise if noisy else 0), cipher.slots.step / cipher.most_weight
    rounding = float(np.finfo(np.float64).eps) * (cipher.bound + cipher.noise_bound)  # value and noise may cancel
    np.testing.assert_allclose(cipher.decrypt(total, keys.secret), expected, rtol=1e-12, atol=finest + rounding)


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
@pytest.mark.parametrize("count", [1, 7, 4099, 8192, 8193])
def test_weighted_means_and_noise(cipher: Cipher, count: int) -> None:
    cipher = replace(cipher, noise_bound=0.1)
    values, noise = [numbers(count, seed=seed) for seed in range(3)], 0.1 * numbers(count, seed=9)
    vectors = [sealed_by(cipher, each, place) for place, each in enumerate(values)]
    keys = keys_of(cipher)
    expected = np.average(values, axis=0, weights=[5, 0, 11])
    mean = cipher.decrypt(cipher.combine(vectors, [5, 0, 11], keys.public), keys.secret)
    assert np.abs(mean - expected).max() <= cipher.resolution
    noised = cipher.decrypt(cipher.combine(vectors, [5, 0, 11], keys.public, noise=noise), keys.secret)
    assert np.abs(noised - expected - noise).max() <= 2 * cipher.resolution


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
def test_sums_of_sums_have_the_weights_of_all(cipher: Cipher) -> None:
    values, keys = [numbers(9, seed=seed) for seed in range(3)], keys_of(cipher)
    vectors = [sealed_by(cipher, each, place) for place, each in enumerate(values)]
    inner = cipher.combine(vectors[:2], [2, 3], keys.public)
    total = cipher.combine([inner, vectors[2]], [4, 7], keys.public)
    assert total.weight == 27
    expected = np.average(values, axis=0, weights=[8, 12, 7])
    assert np.abs(cipher.decrypt(total, keys.secret) - expected).max() <= cipher.resolution


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
def test_single_precision_is_not_rounded_further(cipher: Cipher) -> None:
    cipher = replace(cipher, bound=0.3)
    values = numbers(30, 0.3).astype(np.float32)
    single, double = (sealed_by(cipher, each) for each in (values, values.astype(np.float64)))
    results = [cipher.decrypt(sealed, keys_of(cipher).secret) for sealed in (single, double)]
    assert all(np.abs(result - values).max() <= cipher.resolution for result in results)


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
def test_a_public_key_of_another_pair_is_refused(cipher: Cipher) -> None:
    """A server that relays its own public key in place of the clients' would read what is encrypted under it."""
    ours, theirs = keys_of(cipher), keys_of(cipher, 1)
    with pytest.raises(WrongKeyError, match="which belongs to the secret one"):
        cipher.encrypt(numbers(9), Keys(theirs.public, ours.secret))


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
def test_a_sealed_vector_travels_as_a_message(cipher: Cipher) -> None:
    values = numbers(30)
    received = Sealed.from_state(unpack(pack(sealed_by(cipher, values).to_state())))
    assert np.abs(cipher.decrypt(received, keys_of(cipher).secret) - values).max() <= cipher.resolution


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
def test_bad_input_is_named(cipher: Cipher) -> None:
    keys, stranger = keys_of(cipher), keys_of(cipher, 1)
    vector = sealed_by(cipher, numbers(9))
    foreign = cipher.encrypt(numbers(9), stranger, rng=replayed(0))
    short = replace(vector, body=vector.body[:-1])
    with pytest.raises(WrongKeyError, match="expected a ciphertext under key"):
        cipher.decrypt(vector, stranger.secret)
    with pytest.raises(WrongKeyError, match="expected a ciphertext under key"):
        cipher.combine([vector, foreign], [1, 1], keys.public)
    with pytest.raises(CiphertextError, match="truncated or foreign"):
        cipher.decrypt(short, keys.secret)
    with pytest.raises(CiphertextError, match="truncated or foreign"):
        cipher.combine([vector, short], [1, 1], keys.public)
    with pytest.raises(CiphertextError, match="give all participants the same settings"):
        replace(cipher, bound=2.0).decrypt(vector, keys.secret)
    with pytest.raises(CiphertextError, match="expected 9 encrypted values, got 8"):
        cipher.combine([vector, sealed_by(cipher, numbers(8))], [1, 1], keys.public)
    with pytest.raises(CiphertextError, match="without noise"):
        cipher.combine([cipher.combine([vector], [1], keys.public, noise=np.zeros(9)), vector], [1, 1], keys.public)
    for weights in ([1], [-1, 2], [0, 0], [cipher.most_weight, 1]):
        with pytest.raises(CipherError, match=r"expected (a weight|weights)"):
            cipher.combine([vector, vector], weights, keys.public)
    with pytest.raises(WrongKeyError, match="key"):
        cipher.encrypt(numbers(9), Keys(b"no key at all", keys.secret))


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
@pytest.mark.parametrize("value", [1.0001, -3.0, float("nan"), float("inf")])
def test_a_value_beyond_the_bound_is_an_error_and_not_cut_off(cipher: Cipher, value: float) -> None:
    with pytest.raises(QuantiserOverflowError, match="expected values within ±1, got"):
        sealed_by(cipher, np.array([0.5, value]))


def _damaged(body: Body) -> bytes:
    return bytes(body[:5000]) + bytes(1000) + bytes(body[6000:])


def test_a_damaged_ciphertext_does_not_pass_for_values() -> None:
    vector = sealed_by(SMALL, numbers(40))
    damaged = bytearray(vector.body)
    damaged[20] ^= 1
    with pytest.raises(CiphertextError, match="damaged"):
        SMALL.decrypt(replace(vector, body=bytes(damaged)), keys_of(SMALL).secret)
    ours = sealed_by(Ckks(), numbers(40))
    with pytest.raises(CiphertextError):
        Ckks().decrypt(replace(ours, body=_damaged(ours.body)), keys_of(Ckks()).secret)


@pytest.mark.parametrize(
    "change",
    [{"count": 0}, {"count": "9"}, {"weight": -1}, {"weight": True}, {"noisy": 1}, {"key": None}, {"body": b"x"}],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    state = {**sealed_by(SMALL, numbers(3)).to_state(), **change}
    with pytest.raises(CiphertextError, match="expected an encrypted vector"):
        Sealed.from_state(state)
    with pytest.raises(CiphertextError, match="expected an encrypted vector"):
        Sealed.from_state({"body": torch.zeros(3)})


def test_packing_makes_ciphertexts_fifty_times_smaller() -> None:
    slots = Paillier().slots
    values = 100_000
    assert values * 512 / (slots.num_integers(values) * 512) > 50


@given(st.integers(2, 30), st.integers(1, 30), st.integers(64, 300), st.data())
def test_packing_is_undone(value_bits: int, weight_bits: int, capacity: int, data: st.DataObject) -> None:
    slots = Slots(value_bits, weight_bits, 1.0, 0.0, capacity)
    assume(slots.per_integer > 0)
    levels = data.draw(st.lists(st.integers(0, 2**slots.width - 1), min_size=1, max_size=50))
    packed = slots.pack(np.array(levels, dtype=np.int64))
    assert max(packed).bit_length() <= capacity
    assert slots.unpack(packed, len(levels)).tolist() == levels


def test_small_keys_and_senseless_settings_are_refused() -> None:
    for settings_, message in [
        ({"key_bits": 1024}, "at least 2048, got 1024"),
        ({"key_bits": 2049}, "even key_bits"),
        ({"value_bits": 1}, r"value_bits in 2\.\.52"),
        ({"value_bits": 53, "weight_bits": 1}, r"value_bits in 2\.\.52"),
        ({"value_bits": 40, "weight_bits": 40}, "at most 62"),
        ({"bound": 0.0}, "bound > 0"),
        ({"key_bits": 64, "value_bits": 32, "weight_bits": 30, "unsafe_small": True}, None),
    ]:
        if message is None:
            assert Paillier(**settings_).slots.per_integer == 1  # type: ignore[arg-type]
            continue
        with pytest.raises(ValueError, match=message):
            Paillier(**settings_)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ring to be one of"):
        Ckks(ring=4096)
    with pytest.raises(WrongKeyError, match="expected a key of 2048 bits, got 256"):
        Paillier().encrypt(numbers(3), keys_of(SMALL))


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(seal, "import_module", missing)
    with pytest.raises(LeaktightError, match=r"install leaktight\[ckks\]"):
        Ckks().new_keys()


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), min_size=1, max_size=8), st.integers(1, 10_000))
def test_integer_weights_sum_to_the_scale(shares: dict[str, float], scale: int) -> None:
    assume(sum(shares.values()) > 1e-3)
    whole = integer_weights(shares, scale)
    total = sum(shares.values())
    assert sum(whole.values()) == scale
    assert all(abs(whole[name] - scale * share / total) < 1 + 1e-6 for name, share in shares.items())


@pytest.mark.parametrize("shares", [{"a": 0.0}, {"a": 1.0, "b": -1.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_weights_that_cannot_be_shared_out_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected shares >= 0"):
        integer_weights(shares, 100)


@pytest.mark.parametrize("cipher", CIPHERS, ids=lambda cipher: type(cipher).__name__)
@pytest.mark.parametrize("change", [{"count": 10**12}, {"count": 10**30}, {"weight": 10**30}, {"weight": 10**400}])
def test_numbers_beside_a_ciphertext_are_checked_before_they_are_used(cipher: Cipher, change: dict[str, int]) -> None:
    """A server that states a huge count or weight gets an error of the cipher, and no memory."""
    vector = replace(sealed_by(cipher, numbers(9)), **change)  # type: ignore[arg-type]
    with pytest.raises(CiphertextError, match="expected"):
        cipher.decrypt(vector, keys_of(cipher).secret)
