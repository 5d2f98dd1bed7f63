from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.seeds import replayed

from leaktight.core.errors import LeaktightError, RoundFailedError
from leaktight.crypto.secure_sum import MODULUS, masked, new_private_key, public_key, unmasked_sum


def send(values: Mapping[str, Sequence[int]], *, seed: int = 0, label: str = "test") -> dict[str, bytes]:
    """What all clients send for their values."""
    privates = {name: new_private_key(replayed(seed).child(name)) for name in values}
    publics = {name: public_key(private) for name, private in privates.items()}
    return {name: masked(values[name], name, privates[name], publics, label=label) for name in values}


def words(sent: bytes) -> list[int]:
    return [int(word) for word in np.frombuffer(sent, dtype="<u8")]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_sum_is_exact_modulo_two_to_the_64(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 6))
    names = data.draw(st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=6, unique=True))
    number = st.integers(-(2**63), 2**64 - 1)
    values = {name: data.draw(st.lists(number, min_size=length, max_size=length)) for name in names}
    expected = [sum(column) % MODULUS for column in zip(*values.values(), strict=True)]
    assert unmasked_sum(send(values, seed=data.draw(st.integers(0, 99))), names) == expected


def test_long_vectors_are_masked_to_the_end() -> None:
    values = {name: list(range(start, start + 5000)) for start, name in enumerate("abc")}
    sent = send(values)
    assert unmasked_sum(sent, list("abc")) == [3 * place + 3 for place in range(5000)]
    assert len(set(words(sent["a"]))) == 5000


def test_what_the_server_sees_of_one_client_is_uniform() -> None:
    """The same small numbers in many runs: every byte of what is sent takes all values equally often."""
    runs = [send({"a": [7], "b": [7], "c": [7]}, seed=run) for run in range(800)]
    for client in "abc":
        seen = np.stack([np.frombuffer(sent[client], np.uint8) for sent in runs])
        for place in range(8):
            assert stats.chisquare(np.bincount(seen[:, place] // 16, minlength=16)).pvalue > 1e-4
        both = seen[:, 7] // 64 * 4 + seen[:, 0] // 64
        assert stats.chisquare(np.bincount(both, minlength=16)).pvalue > 1e-4, "first and last byte are independent"


def test_what_a_client_sends_says_nothing_about_its_value() -> None:
    """Two very different values: a two-sample test over many runs cannot tell them apart."""
    small = [words(send({"a": [1], "b": [5]}, seed=run)["a"])[0] for run in range(500)]
    large = [words(send({"a": [10**12], "b": [5]}, seed=1000 + run)["a"])[0] for run in range(500)]
    assert stats.ks_2samp(small, large).pvalue > 1e-4


def test_a_client_that_dropped_out_is_named() -> None:
    sent = send({"a": [1], "b": [2], "c": [3], "d": [4]})
    del sent["b"], sent["d"]
    with pytest.raises(RoundFailedError, match="got none of b, d"):
        unmasked_sum(sent, ["a", "b", "c", "d"])
    assert (words(sent["a"])[0] + words(sent["c"])[0]) % MODULUS != 4, "the masks of those left do not cancel"


def test_a_stranger_and_a_wrong_length_are_named() -> None:
    sent = send({"a": [1], "b": [2], "c": [3]})
    with pytest.raises(RoundFailedError, match="got some of c"):
        unmasked_sum(sent, ["a", "b"])
    with pytest.raises(RoundFailedError, match="as many of c as of a, got 7 and 8 bytes"):
        unmasked_sum({**sent, "c": sent["c"][:7]}, ["a", "b", "c"])


def test_masks_differ_for_every_label_pair_and_key() -> None:
    """With zeros as values, what is sent is the mask itself."""
    zeros = {name: [0, 0] for name in "abc"}
    first = send(zeros, label="round 1")
    assert first == send(zeros, label="round 1"), "a seeded stream gives the same masks"
    variants = [first, send(zeros, label="round 2"), send(zeros, seed=1, label="round 1")]
    seen = [word for sent in variants for part in sent.values() for word in words(part)]
    assert len(set(seen)) == len(seen) == 18


def test_names_and_labels_cannot_run_into_each_other() -> None:
    private = new_private_key(replayed(0))
    other = public_key(new_private_key(replayed(1)))
    ours = {"label": ("x", "ab"), "shifted": ("xa", "b")}
    sent = {
        case: masked([0], name, private, {name: public_key(private), "zz": other}, label=label)
        for case, (label, name) in ours.items()
    }
    assert sent["label"] != sent["shifted"]


def test_keys_from_the_operating_system_are_fresh() -> None:
    keys = {new_private_key() for _ in range(20)}
    assert len(keys) == 20
    assert {len(key) for key in keys} == {32}
    assert new_private_key(replayed(3)) == new_private_key(replayed(3)) != new_private_key(replayed(3).child("next"))


def test_bad_keys_are_refused_by_name() -> None:
    private = new_private_key(replayed(0))
    own = public_key(private)
    with pytest.raises(LeaktightError, match="the public key of a among those relayed"):
        masked([1], "a", private, {"a": public_key(new_private_key(replayed(1))), "b": own}, label="test")
    for broken in (bytes(32), b"short"):
        with pytest.raises(LeaktightError, match="a public key of b that can be used"):
            masked([1], "a", private, {"a": own, "b": broken}, label="test")


def test_one_client_alone_is_refused() -> None:
    private = new_private_key(replayed(0))
    with pytest.raises(LeaktightError, match="expected at least 2 clients in a secure sum, got a alone"):
        masked([1], "a", private, {"a": public_key(private)}, label="test")
