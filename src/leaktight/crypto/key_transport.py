"""Encrypted transport of a secret between two clients through a server.

>>> ann, bob = bytes(range(32)), bytes(range(32, 64))
>>> box = boxed(b"the key", ann, public_key(bob), label="demo")
>>> opened(box, bob, public_key(ann), label="demo")
b'the key'

Private keys come from `secure_sum.new_private_key`.
Assumes: public keys arrive unchanged. A server that replaces them by its own can read everything; clients that do not
trust it must compare or sign their public keys over another channel.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from leaktight.crypto.cipher import CiphertextError, WrongKeyError
from leaktight.crypto.secure_sum import KEY_BYTES, public_key

_NONCE = bytes(12)  # constant, because a pair of keys and a label are used for one box


def boxed(content: bytes, own_private: bytes, peer_public: bytes, *, label: str) -> bytes:
    """Content that only the peer can read, and that only this sender can have made. label: its purpose."""
    return _cipher(own_private, peer_public, public_key(own_private), peer_public, label).encrypt(_NONCE, content, None)


def opened(box: bytes, own_private: bytes, peer_public: bytes, *, label: str) -> bytes:
    """The inverse of `boxed`, at the receiver."""
    try:
        return _cipher(own_private, peer_public, peer_public, public_key(own_private), label).decrypt(_NONCE, box, None)
    except InvalidTag as error:
        raise CiphertextError(
            f"expected a box for this client, labelled {label!r}, got one that was changed or is for somebody else"
        ) from error


def _cipher(own: bytes, peer: bytes, sender: bytes, receiver: bytes, label: str) -> ChaCha20Poly1305:
    try:
        secret = X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise WrongKeyError(f"expected a public key that can be used, got {len(peer)} bytes that cannot") from error
    # both keys are part of the derivation, so that a box is valid only from this sender to this receiver
    info = b"leaktight key transport" + sender + receiver + label.encode()
    return ChaCha20Poly1305(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret))
