"""Bounds on what is pulled from a SuperLink, with a client that has no network."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import leaktight.engines.flower  # noqa: F401  # switches Flower's telemetry off before Flower is imported
from leaktight.engines.flower.bounded import CHUNK_BYTES, MORE_PARTS, OBJECT_BYTES, BoundedClient, refuse_large

from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse  # isort: skip
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse  # isort: skip
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError  # isort: skip


class Link:
    """Announces replies, and has those parts of them that are in `there`."""

    def __init__(self, *trees: ObjectTree, there: dict[str, bytes] | None = None) -> None:
        self.trees, self.there = trees, {} if there is None else there

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        return PullAppMessagesResponse(message_object_trees=self.trees)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        content = self.there.get(request.object_id)
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content or b""
        )

    def close(self) -> str:
        return "closed"


def tree(name: str, *parts: str) -> ObjectTree:
    return ObjectTree(object_id=name, children=[ObjectTree(object_id=part) for part in parts])


def pull(client: BoundedClient, name: str) -> bytes:
    return bytes(client.PullObject(PullObjectRequest(object_id=name)).object_content)


def test_a_reply_within_the_bounds_passes() -> None:
    client: Any = BoundedClient(Link(tree("a", "b"), there={"a": b"1", "b": b"2"}), 1000, 60.0)
    client.PullMessages(PullAppMessagesRequest())
    assert [pull(client, "a"), pull(client, "b")] == [b"1", b"2"]
    assert client.close() == "closed"


def test_a_reply_of_too_many_parts_or_bytes_is_given_up_and_others_are_not() -> None:
    most = 4 * CHUNK_BYTES
    many = tree("many", *(f"part {number}" for number in range(MORE_PARTS + 5)))
    piece = bytes(OBJECT_BYTES // 2)
    large = tree("large", "first", "second", "third")
    link = Link(many, large, tree("good"), there={"first": piece, "second": piece, "third": piece, "good": b"x"})
    client = BoundedClient(link, most, 60.0)
    client.PullMessages(PullAppMessagesRequest())
    with pytest.raises(ObjectPullError, match="too large"):
        pull(client, "many")
    assert len(pull(client, "first")) == len(piece)
    assert len(pull(client, "second")) == len(piece)
    with pytest.raises(ObjectPullError, match="too large"):
        pull(client, "third")
    assert pull(client, "good") == b"x"


def test_a_part_that_is_announced_and_never_there_is_given_up() -> None:
    patient, hurried = BoundedClient(Link(tree("a")), 1000, 60.0), BoundedClient(Link(tree("a")), 1000, 0.0)
    for client in (patient, hurried):
        client.PullMessages(PullAppMessagesRequest())
    assert pull(patient, "a") == b""
    with pytest.raises(ObjectPullError, match="not there within 0 s"):
        pull(hurried, "a")


@pytest.mark.parametrize(
    ("path", "size", "refused"), [("pull-object", 1, True), ("pull-object", 0, False), ("x", 1, False)]
)
def test_a_large_part_is_refused_before_its_body_is_read(path: str, size: int, refused: bool) -> None:
    request = httpx.Request("POST", f"https://link/v1/runtime/{path}")
    response = httpx.Response(200, headers={"content-length": str(OBJECT_BYTES + size)}, request=request)
    if refused:
        with pytest.raises(ObjectPullError, match="more than"):
            refuse_large(response)
    else:
        refuse_large(response)
