from __future__ import annotations

import pytest
from tests.seeds import replayed

from leaktight.crypto.cipher import CiphertextError, WrongKeyError
from leaktight.crypto.key_transport import boxed, opened
from leaktight.crypto.secure_sum import new_private_key, public_key

ANN, BOB, EVE = (new_private_key(replayed(seed)) for seed in (1, 2, 3))
SECRET = b"a key of many bytes" * 20


def test_only_the_receiver_opens_a_box_and_only_as_it_was_sent() -> None:
    box = boxed(SECRET, ANN, public_key(BOB), label="keys")
    assert opened(box, BOB, public_key(ANN), label="keys") == SECRET
    assert SECRET[:8] not in box
    for private, sender, label, content in [
        (EVE, public_key(ANN), "keys", box),
        (BOB, public_key(EVE), "keys", box),
        (BOB, public_key(ANN), "other", box),
        (BOB, public_key(ANN), "keys", box[:-1]),
        (BOB, public_key(ANN), "keys", bytes([box[0] ^ 1]) + box[1:]),
    ]:
        with pytest.raises(CiphertextError, match="changed or is for somebody else"):
            opened(content, private, sender, label=label)


def test_a_box_does_not_go_back_to_its_sender() -> None:
    box = boxed(SECRET, ANN, public_key(BOB), label="keys")
    with pytest.raises(CiphertextError):
        opened(box, ANN, public_key(BOB), label="keys")


def test_a_public_key_that_is_none_is_named() -> None:
    with pytest.raises(WrongKeyError, match="5 bytes that cannot"):
        boxed(SECRET, ANN, b"short", label="keys")
