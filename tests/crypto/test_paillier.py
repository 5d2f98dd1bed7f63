from __future__ import annotations

import math

import numpy as np
import phe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import replayed

from leaktight.core.errors import LeaktightError
from leaktight.crypto import paillier_keys
from leaktight.crypto.cipher import CipherError, CiphertextError, WrongKeyError
from leaktight.crypto.paillier_keys import PublicKey, SecretKey

SMALL = SecretKey.generate(256, rng=replayed(1), unsafe_small=True)
OTHER = SecretKey.generate(256, rng=replayed(2), unsafe_small=True)


@pytest.fixture(scope="module")
def full() -> SecretKey:
    return SecretKey.generate(2048, rng=replayed(3))


def test_a_key_has_its_length_and_its_primes_the_form_that_short_exponents_need(full: SecretKey) -> None:
    assert full.public.n == full.p * full.q
    assert full.public.bits == 2048
    assert full.p % 4 == full.q % 4 == 3
    assert math.gcd(full.p - 1, full.q - 1) == 2
    assert full.p.bit_length() == full.q.bit_length() == 1024


def test_longer_keys_work_too() -> None:
    key = SecretKey.generate(3072, rng=replayed(4))
    assert key.public.bits == 3072
    assert key.decrypt(key.public.encrypt([7], rng=replayed(0))) == [7]


@pytest.mark.parametrize("bits", [1024, 2047, 128])
def test_short_keys_are_refused_unless_they_are_called_unsafe(bits: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2048, got {bits}"):
        SecretKey.generate(bits)


def test_keys_repeat_with_the_stream_and_differ_without() -> None:
    assert SecretKey.generate(128, rng=replayed(5), unsafe_small=True) == SecretKey.generate(
        128, rng=replayed(5), unsafe_small=True
    )
    assert SecretKey.generate(128, unsafe_small=True) != SecretKey.generate(128, unsafe_small=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, SMALL.public.n - 1), max_size=4), st.integers(0, 2**32))
def test_decryption_undoes_encryption(messages: list[int], seed: int) -> None:
    assert SMALL.decrypt(SMALL.public.encrypt(messages, rng=replayed(seed))) == messages


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64), st.integers(0, 2**16)), min_size=1, max_size=6))
def test_weighted_products_decrypt_to_weighted_sums(terms: list[tuple[int, int]]) -> None:
    messages, weights = zip(*terms, strict=True)
    ciphers = SMALL.public.encrypt(messages, rng=replayed(0))
    total = SMALL.public.weighted_product(ciphers, weights)
    assert SMALL.decrypt([total]) == [sum(m * w for m, w in terms)]


def test_the_table_gives_the_same_ciphertexts_as_plain_powers() -> None:
    messages = list(range(2 * paillier_keys._WORTH_A_TABLE))
    by_table = SMALL.public.encrypt(messages, rng=replayed(0))
    assert by_table[:10] == SMALL.public.encrypt(messages[:10], rng=replayed(0))
    square = SMALL.public.n**2
    exponents = paillier_keys._draws(replayed(0), SMALL.public.exponent_bits)
    for message, cipher, exponent in zip(messages, by_table, exponents, strict=False):
        expected = (1 + message * SMALL.public.n) * pow(SMALL.public.base, exponent, square) % square
        assert cipher == expected


def test_processes_and_threads_change_nothing() -> None:
    messages = list(range(20))
    alone = SMALL.public.encrypt(messages, rng=replayed(0))
    assert SMALL.public.encrypt(messages, rng=replayed(0), workers=2) == alone
    assert SMALL.decrypt(alone, threads=3) == messages


def test_the_primes_make_encryption_quicker_and_change_nothing(full: SecretKey) -> None:
    messages = [0, 7, full.public.n - 1]
    plain = full.public.encrypt(messages, rng=replayed(0))
    assert full.public.encrypt(messages, rng=replayed(0), secret=full) == plain
    many = list(range(2 * paillier_keys._WORTH_A_TABLE))
    assert SMALL.public.encrypt(many, rng=replayed(1), secret=SMALL) == SMALL.public.encrypt(many, rng=replayed(1))


def test_one_message_has_many_ciphertexts() -> None:
    ciphers = SMALL.public.encrypt([5] * 50, rng=replayed(0)) + SMALL.public.encrypt([5] * 50)
    assert len(set(ciphers)) == 100


def test_phe_reads_our_ciphertexts_and_we_read_its(full: SecretKey) -> None:
    public = phe.PaillierPublicKey(full.public.n)
    private = phe.PaillierPrivateKey(public, full.p, full.q)
    messages = [0, 1, 2**70, full.public.n - 1]
    assert [private.raw_decrypt(cipher) for cipher in full.public.encrypt(messages, rng=replayed(0))] == messages
    theirs = [public.raw_encrypt(message) for message in messages]
    assert full.decrypt(theirs) == messages


def test_sums_mix_with_those_of_phe(full: SecretKey) -> None:
    public = phe.PaillierPublicKey(full.public.n)
    private = phe.PaillierPrivateKey(public, full.p, full.q)
    ours, theirs = full.public.encrypt([1000], rng=replayed(0))[0], phe.EncryptedNumber(public, public.raw_encrypt(234))
    together = full.public.weighted_product([ours, theirs.ciphertext()], [3, 5])
    assert private.raw_decrypt(together) == 3 * 1000 + 5 * 234
    assert private.raw_decrypt((theirs * 2 + phe.EncryptedNumber(public, ours)).ciphertext()) == 2 * 234 + 1000


def test_a_known_number_can_be_added() -> None:
    (cipher,) = SMALL.public.encrypt([40], rng=replayed(0))
    assert SMALL.decrypt([SMALL.public.shifted(cipher, 2)]) == [42]


def test_keys_as_bytes_come_back_and_nothing_else_does() -> None:
    assert PublicKey.from_bytes(SMALL.public.to_bytes()) == SMALL.public
    assert SecretKey.from_bytes(SMALL.to_bytes()) == SMALL
    for data in (b"", SMALL.to_bytes()[:-1], SMALL.to_bytes() + b"x", SMALL.public.to_bytes(), b"\x80\x04pickle"):
        with pytest.raises(WrongKeyError, match="secret key of Paillier"):
            SecretKey.from_bytes(data)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader_of_keys(data: bytes) -> None:
    with pytest.raises(WrongKeyError):
        PublicKey.from_bytes(data)


def test_what_cannot_be_a_ciphertext_is_named() -> None:
    key = SMALL.public
    body = key.join(key.encrypt([1, 2], rng=replayed(0)))
    assert key.part(body, 2) == key.encrypt([1, 2], rng=replayed(0))
    size = key.ciphertext_bytes
    foreign = OTHER.public.join(OTHER.public.encrypt([1], rng=replayed(0)))
    for bad, number, message in [
        (body[:-1], 2, "truncated or foreign"),
        (body, 3, "expected 3 ciphertexts of 64 bytes, got 128 bytes"),
        (bytes(size), 1, "impossible numbers"),
        (b"\xff" * size, 1, "impossible numbers"),
        (key.n.to_bytes(size, "big"), 1, "impossible numbers"),
        ((key.n**2).to_bytes(size, "big"), 1, "impossible numbers"),
        (foreign + b"\0", 1, "truncated or foreign"),
    ]:
        with pytest.raises(CiphertextError, match=message):
            key.part(bad, number)


def test_messages_outside_the_range_are_refused() -> None:
    for message in (-1, SMALL.public.n):
        with pytest.raises(CipherError, match="from 0 to n - 1"):
            SMALL.public.encrypt([message])


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(paillier_keys, "import_module", missing)
    with pytest.raises(LeaktightError, match=r"install leaktight\[he\]"):
        SMALL.public.encrypt([1])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 130))
def test_draws_fill_their_range_and_repeat(seed: int, bits: int) -> None:
    draws = [next(draw) for draw in [paillier_keys._draws(replayed(seed), bits)] for _ in range(64)]
    assert all(0 <= draw < 2**bits for draw in draws)
    assert draws[0] == next(paillier_keys._draws(replayed(seed), bits))
    if bits > 20:
        tops = np.array([draw >> (bits - 1) for draw in draws])
        assert 10 < tops.sum() < 54
