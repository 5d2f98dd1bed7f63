"""Requests and replies as Flower messages. Received bytes are not trusted: invalid ones are an error."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import astuple, dataclass, replace

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from leaktight.core.errors import LeaktightError, UntrustedError
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import Broadcast, Params
from leaktight.engines.flower.identity import Identity, hello_words, is_signed, reply_words
from leaktight.fl.limits import Limits
from leaktight.fl.messages import (
    Answered,
    Ask,
    Declined,
    Evaluate,
    Evaluated,
    Failed,
    Outcome,
    Reply,
    Request,
    Train,
    Trained,
    decode,
    encode,
)

HELLO = f"{MessageType.QUERY}.hello"
"""The type of the message that asks a node which client it is."""

_HEAD, _ASKED, _MODEL, _REPLY, _CLIENT, _PROOF = (
    "leaktight",
    "leaktight.request",
    "leaktight.model",
    "leaktight.reply",
    "leaktight.client",
    "leaktight.proof",
)
_TYPES: dict[type, str] = {Train: MessageType.TRAIN, Evaluate: MessageType.EVALUATE, Ask: MessageType.QUERY}
_NPY_HEAD = 1024  # bytes before the content of an array
LONGEST_NAME = 200
_REPLIES = (Trained, Evaluated, Answered, Declined)


@dataclass(frozen=True)
class Place:
    """The position of a request in a run, by which a node recognises repeated requests.

    run: the name of the run. session: of the server process. epoch: how often the server had stored its state.
    turn: the number of requests since then.
    """

    run: str
    session: str
    epoch: int
    turn: int


@dataclass(frozen=True)
class Envelope:
    """A request with its position. digest: a hash of the request, including the model."""

    place: Place
    request: Request
    digest: str


def model_record(broadcast: Broadcast) -> ArrayRecord:
    """The model as one array of bytes, which Flower splits into chunks and stores once."""
    return _record(pack({"params": broadcast.params, "buffers": broadcast.buffers}))


def request_message(request: Request, model: ArrayRecord | None, place: Place, node: int, ttl: float | None) -> Message:
    head = ConfigRecord(
        {
            "run": place.run,
            "session": place.session,
            "epoch": place.epoch,
            "turn": place.turn,
        }
    )
    content = RecordDict({_HEAD: head, _ASKED: _record(encode({"request": _with_model(request, {}, {})}))})
    if model is not None:
        content[_MODEL] = model
    return Message(content, node, _TYPES[type(request)], ttl=ttl, group_id=str(place.epoch))


def read_request(message: Message) -> Envelope:
    """The inverse of `request_message`."""
    try:
        place = Place(*place_of(message))
        light = _bytes(message.content.array_records[_ASKED])
        request, total = decode(light)["request"], hashlib.sha256(light)
        if _MODEL in message.content:
            packed = _bytes(message.content.array_records[_MODEL])
            model = unpack(packed)
            request = _with_model(request, model["params"], model["buffers"])
            total.update(packed)
        if _TYPES[type(request)] != message.metadata.message_type:
            raise ValueError("another type of message than its request")
        _require_plain(request)
        if isinstance(request, Train) and request.broadcast.round != place.epoch:
            raise ValueError("another round than its position")
    except LeaktightError:
        raise
    except Exception as error:
        raise LeaktightError(f"not a request of this protocol ({type(error).__name__})") from error
    return Envelope(place, request, total.hexdigest())


def reply_bytes(reply: Reply) -> bytes:
    """A reply as bytes, to send and to store."""
    return encode({"reply": reply})


def reply_message(reply: Reply | bytes, to: Message, client: str, identity: Identity) -> Message:
    """The answer to a request, signed for the place of that request. reply: a reply, or its `reply_bytes`."""
    data = reply if isinstance(reply, bytes) else reply_bytes(reply)
    proof = ConfigRecord({"signature": identity.sign(reply_words(place_of(to), client, data))})
    return Message(RecordDict({_REPLY: _record(data), _PROOF: proof}), reply_to=to)


def read_reply(message: Message, limits: Limits = Limits(), *, proof: Proof | None = None) -> Outcome:
    """The inverse of `reply_message`; any other message is a failure of the client.

    limits: of what it may hold. proof: who has to have signed it, and for which request; None: not checked.
    """
    if message.has_error():
        # The reason can hold the text of a client's exception, so it is not read.
        return Failed(_ERRORS.get(message.error.code, f"Flower's error {message.error.code!s:.20}"))
    try:
        data = _bytes(message.content.array_records[_REPLY], limits.most_bytes)
        if proof is not None:
            proof.check(data, message)
        reply = decode(data, limits)["reply"]
    except UntrustedError as error:
        return Failed(f"the answer is refused: {error}")
    except Exception as error:
        return Failed(f"the answer cannot be read ({type(error).__name__})")
    return reply if isinstance(reply, _REPLIES) else Failed("the answer is not a reply of this protocol")


@dataclass(frozen=True)
class Proof:
    """Who has to have signed a reply, and for which request."""

    place: Place
    client: str
    key: bytes

    def check(self, data: bytes, message: Message) -> None:
        """Raise `UntrustedError` unless the client signed these bytes as the answer to this request."""
        records = message.content.config_records
        signature = records[_PROOF].get("signature") if _PROOF in records else None
        if not is_signed(reply_words(astuple(self.place), self.client, data), signature, self.key):
            raise UntrustedError("it is not signed by this client for this request")


def hello_message(node: int, nonce: bytes, ttl: float | None) -> Message:
    """The question who a node is. nonce: random bytes that the node has to sign."""
    return Message(RecordDict({_CLIENT: ConfigRecord({"nonce": nonce})}), node, HELLO, ttl=ttl)


def hello_reply(client: str, identity: Identity, to: Message) -> Message:
    nonce = to.content.config_records[_CLIENT]["nonce"]
    if not isinstance(nonce, bytes):
        raise LeaktightError("not a greeting of this protocol")
    signature = identity.sign(hello_words(nonce, to.metadata.dst_node_id, client))
    answer = ConfigRecord({"client": client, "key": identity.public, "signature": signature})
    return Message(RecordDict({_CLIENT: answer}), reply_to=to)


def read_hello(message: Message, nonce: bytes, node: int) -> tuple[str, bytes] | None:
    """The name of the client and its key, or None if the node does not prove that it has the key."""
    try:
        said = message.content.config_records[_CLIENT]
        client, key = said["client"], said["key"]
        if not isinstance(client, str) or not isinstance(key, bytes) or len(client) > LONGEST_NAME:
            return None
        return (client, key) if is_signed(hello_words(nonce, node, client), said["signature"], key) else None
    except Exception:
        return None


def place_of(message: Message) -> tuple[str, str, int, int]:
    """The place of a request, unchecked: a node signs it also where it declines the request."""
    head = message.content.config_records[_HEAD]
    return str(head["run"]), str(head["session"]), _whole(head["epoch"]), _whole(head["turn"])


_ERRORS = {
    1: "the node could not load the app; see its log",
    2: "the client's app raised an error; see its log",
    3: "the request timed out, or its answer was refused while it was pulled",
    4: "the answer is lost",
    5: "the node is gone",
    8: "the client's process died",
}
"""What Flower's error codes mean (flwr.common.constant.ErrorCode)."""


def _require_plain(request: Request) -> None:
    """Raise ValueError for a request with a network, or a question to an unknown recipient."""
    if isinstance(request, Ask):
        if request.to not in ("aggregator", "defense"):
            raise ValueError("a question to an unknown recipient")
    elif request.broadcast.model is not None:
        raise ValueError("a network beside the tensors")


def _with_model(request: Request, params: Params, buffers: Params) -> Request:
    """The request with this model in it, or with none: it travels once for all clients."""
    if isinstance(request, Ask):
        return request
    return replace(request, broadcast=replace(request.broadcast, params=params, buffers=buffers))


def _record(data: bytes) -> ArrayRecord:
    return ArrayRecord({"bytes": Array(np.frombuffer(data, dtype=np.uint8))})


def _bytes(record: ArrayRecord, most: float = math.inf) -> bytes:
    """The bytes in a record, without believing what it says about its size. most: their largest number."""
    data = record["bytes"].data
    if len(data) > most + _NPY_HEAD:
        raise UntrustedError(f"it has {len(data)} bytes, more than {most:.0f}")
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("expected bytes")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype != np.uint8 or shape != (len(data) - file.tell(),):
        raise ValueError("expected bytes")
    return data[file.tell() :]


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("expected a whole number")
    return value
