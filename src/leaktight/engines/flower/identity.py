"""Who a node is: a key of its own, made at the node, with which it signs its name and every reply.

Flower authenticates nodes to the SuperLink, but neither tells a ServerApp which client a node is, nor compares the
sender of a reply with the node that delivers it. So a server keeps the key of each client, and checks every reply.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.app import ConfigRecord, RecordDict

from leaktight.core.errors import CheckpointError
from leaktight.core.files import make_private_folder, write_private
from leaktight.core.keys import parse_key

_RECORD = "leaktight.identity"


@dataclass(frozen=True)
class Identity:
    """The key of a client (Ed25519). private: its 32 bytes, which never leave the node."""

    private: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The 32 bytes by which a server knows the client."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, words: bytes) -> bytes:
        return self._key.sign(words)

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.private)


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate().private_bytes_raw())


def identity_in(folder: Path, client: str) -> Identity:
    """The key of a client in the private folder of its node; made when it is first asked for."""
    path = folder / f"{client}.key"
    make_private_folder(folder)
    with filelock.FileLock(folder / f"{client}.lock", mode=0o600):
        if not path.exists():
            write_private(path, new_identity().private.hex())
        try:
            return Identity(parse_key(path.read_text().strip()))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not the key of a node ({error}); restore it, or remove it and have the server's operator "
                f"forget the old one"
            ) from error


def identity_in_context(state: RecordDict) -> Identity:
    """The key of a node without a folder: in Flower's context, which lasts as long as Flower's run."""
    if _RECORD not in state.config_records:
        state[_RECORD] = ConfigRecord({"private": new_identity().private})
    held = state.config_records[_RECORD]["private"]
    assert isinstance(held, bytes)
    return Identity(held)


def is_signed(words: bytes, signature: object, public: bytes) -> bool:
    """Whether the owner of this public key signed these words."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature if isinstance(signature, bytes) else b"", words)
    except (InvalidSignature, ValueError):
        return False
    return True


def hello_words(nonce: bytes, node: int, client: str) -> bytes:
    """What a node signs to prove who it is. nonce: drawn by the server for this question. node: its number."""
    return json.dumps(["leaktight hello", nonce.hex(), node, client]).encode()


def reply_words(place: tuple[str, str, int, int], client: str, data: bytes) -> bytes:
    """What a node signs with a reply. place: run, session, epoch and turn of the request. data: the reply's bytes."""
    return json.dumps(["leaktight reply", *place, client, hashlib.sha256(data).hexdigest()]).encode()
