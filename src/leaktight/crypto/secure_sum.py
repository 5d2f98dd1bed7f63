"""Secure sums: the server learns the sum of private integers and nothing else.

Every pair of clients agrees on a secret (X25519) and expands it to a mask; of a pair, the client whose name sorts later
adds the mask and the other subtracts it, so that all masks cancel in the sum over all clients. Sums are modulo 2^64,
where a masked number is uniform.

>>> privates = {name: new_private_key(Rng.fresh().child(name)) for name in ("ann", "bob", "cyd")}
>>> publics = {name: public_key(private) for name, private in privates.items()}
>>> values = {"ann": [3, 10], "bob": [4, 20], "cyd": [5, 30]}
>>> sent = {n: masked(values[n], n, privates[n], publics, label="ages") for n in values}
>>> unmasked_sum(sent, ["ann", "bob", "cyd"])
[12, 60]

Assumes: public keys arrive unchanged (a server that is curious but not malicious, or a public-key infrastructure).
Colluding clients learn the sum of the others, so with two clients each learns the other's number. A pair of keys and a
label may mask only one vector; a second one would reveal the difference of the two.
Reference: Bonawitz et al. 2017, the first of its protocols (no recovery from clients that drop out).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from leaktight.core.errors import LeaktightError, RoundFailedError
from leaktight.core.rng import Rng

KEY_BYTES = 32
MODULUS = 2**64
_WORD = np.dtype("<u8")
_NONCE = bytes(16)  # constant, because no key is used twice


def new_private_key(rng: Rng | None = None) -> bytes:
    """A private key: from the operating system's entropy, or from `rng` for runs that can be repeated exactly.

    The seed of the stream determines the key, so a deployed client passes None, or a stream of `Rng.fresh`.
    """
    if rng is None:
        return secrets.token_bytes(KEY_BYTES)
    return rng.secret_bytes(KEY_BYTES)


def public_key(private: bytes) -> bytes:
    """The public key, from which other clients derive the secret that they share with this one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def masked(values: Sequence[int], client: str, private: bytes, publics: Mapping[str, bytes], *, label: str) -> bytes:
    """The masked `values` of `client`, 8 bytes each: uniform for everybody without one of the private keys.

    publics: the public keys of all clients that take part, including its own. label: the purpose of the sum.
    """
    if publics.get(client) != public_key(private):
        raise LeaktightError(f"expected the public key of {client} among those relayed, got another or none")
    if len(publics) < 2:
        raise LeaktightError(f"expected at least 2 clients in a secure sum, got {client} alone: the sum is its value")
    key = X25519PrivateKey.from_private_bytes(private)
    result = np.array([int(value) % MODULUS for value in values], dtype=_WORD)
    for peer in publics:
        if peer != client:
            mask = _pair_mask(client, peer, key, publics, label, len(values))
            result = result + mask if client > peer else result - mask
    return result.tobytes()


def unmasked_sum(sent: Mapping[str, bytes], clients: Sequence[str]) -> list[int]:
    """The sums modulo 2^64, from what every one of `clients` sent. Without one of them the masks would not cancel."""
    missing = sorted(set(clients) - set(sent))
    if missing:
        raise RoundFailedError(
            f"expected masked values of all {len(clients)} clients, got none of {', '.join(missing)}; "
            "without them the masks do not cancel; start again without these clients"
        )
    unknown = sorted(set(sent) - set(clients))
    if unknown:
        raise RoundFailedError(f"expected masked values of the agreed clients only, got some of {', '.join(unknown)}")
    size = len(sent[clients[0]])
    total = np.zeros(size // _WORD.itemsize, dtype=_WORD)
    for client in clients:
        if len(sent[client]) != size or size % _WORD.itemsize:
            raise RoundFailedError(
                f"expected 8 bytes for each masked value, as many of {client} as of {clients[0]}, "
                f"got {len(sent[client])} and {size} bytes"
            )
        total += np.frombuffer(sent[client], dtype=_WORD)
    return [int(value) for value in total]


def _pair_mask(
    client: str, peer: str, private: X25519PrivateKey, publics: Mapping[str, bytes], label: str, length: int
) -> NDArray[np.uint64]:
    """The mask that two clients share for one label."""
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(publics[peer]))
    except ValueError as error:
        raise LeaktightError(
            f"expected a public key of {peer} that can be used, got {len(publics[peer])} bytes that cannot ({error})"
        ) from error
    # names, keys and label are part of the derivation, so that a mask is used only for this pair and label
    parts = [label.encode(), *(part for name in sorted((client, peer)) for part in (name.encode(), publics[name]))]
    info = b"leaktight secure sum" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    key = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(length * _WORD.itemsize))
    return np.frombuffer(stream, dtype=_WORD)
