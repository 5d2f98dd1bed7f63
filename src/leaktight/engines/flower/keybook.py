"""The keys by which a server knows its clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from leaktight.core.errors import CheckpointError, UsageError
from leaktight.core.files import write_private
from leaktight.core.keys import parse_key
from leaktight.core.reading import read_toml


@dataclass
class KeyBook:
    """The public key of each client: listed by the operator, or that of the first node that takes the name.

    path: the file in which keys of first use are kept; None: only as long as this object.
    listed: by client; a name that is not listed has no node. None: first use.
    """

    path: Path | None = None
    listed: Mapping[str, bytes] | None = None
    _pinned: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                self._pinned = {name: parse_key(text) for name, text in json.loads(self.path.read_text()).items()}
            except (ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path} is not a list of keys by client; restore it, or remove it to take the next nodes"
                ) from error

    def key_of(self, client: str) -> bytes | None:
        """The key of a client, or None if it has none yet."""
        return self._pinned.get(client) if self.listed is None else self.listed.get(client)

    def why_not(self, client: str, key: bytes) -> str | None:
        """Why the node with this key is not that client, or None if it may be."""
        if self.listed is not None and client not in self.listed:
            return "the operator's list has no key for that client"
        if self.key_of(client) in (None, key):
            return None
        if self.listed is not None:
            return "the operator's list has another key"
        where = "" if self.path is None else f" (its key is in {self.path}; remove that line to let another take it)"
        return f"that client had another key{where}"

    def pin(self, client: str, key: bytes) -> None:
        """Keep the key of a client from now on."""
        if self.listed is not None or self._pinned.get(client) == key:
            return
        self._pinned[client] = key
        if self.path is not None:
            keys = {name: held.hex() for name, held in sorted(self._pinned.items())}
            write_private(self.path, json.dumps(keys, indent=1) + "\n")


def read_keys(path: Path) -> dict[str, bytes]:
    """The operator's list: a TOML file with one line for each client, `client-000 = "<64 hexadecimal digits>"`."""
    try:
        return {name: parse_key(str(text)) for name, text in read_toml(path, UsageError).items()}
    except ValueError as error:
        raise UsageError(
            f'{path}: expected a line client = "<64 hexadecimal digits>" for each client: {error}; '
            "`leaktight flower key` prints a node's"
        ) from error
