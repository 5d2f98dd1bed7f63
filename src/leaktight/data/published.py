"""Published data sets and weights, listed in `published.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from pydantic import TypeAdapter

from leaktight.data.download import RemoteFile


@dataclass(frozen=True, kw_only=True)
class Source:
    """A published data set or set of weights.

    folder: its path below the data root. files: downloaded into it. archive: downloaded and unpacked as the folder, or
    its part below `subtree`. contents: published checksums of unpacked files. manual: instructions for a data set that
    needs an agreement or has no published checksum; `{folder}` stands for the folder.
    """

    description: str
    terms: str
    folder: str
    files: tuple[RemoteFile, ...] = ()
    archive: RemoteFile | None = None
    subtree: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    manual: str = ""

    def __post_init__(self) -> None:
        if bool(self.manual) == bool(self.files or self.archive):
            raise ValueError(f"expected either files to fetch or an explanation, got {self.description!r}")


_LISTED = resources.files("leaktight.data").joinpath("published.toml").read_text(encoding="utf-8")

SOURCES: Mapping[str, Source] = TypeAdapter(dict[str, Source]).validate_python(tomllib.loads(_LISTED))
"""By the name that `leaktight data` accepts."""
