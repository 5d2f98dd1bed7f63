"""Downloads: streamed, resumed, verified by checksum, and moved into place only when complete."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import filelock
import httpx

from leaktight.core.errors import ChecksumError, DownloadError, LeaktightError

ByteProgress = Callable[[int, int | None], None]
"""Called with the bytes received and the total, or None if the server does not state it."""

_ALGORITHMS = {"sha256": ("sha256", 64), "md5": ("md5", 32), "sha256-prefix": ("sha256", None)}
_ATTEMPTS = 4
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_WORTH_RETRYING = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A published file.

    name: its path below the folder of its data set. urls: the canonical address first, then mirrors.
    checksum: "sha256:<hex>", "md5:<hex>" or "sha256-prefix:<hex>", the first digits that PyTorch puts in a file name.
    size: in bytes, or None if unknown; a download that exceeds it is stopped.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str
    size: int | None = None

    def __post_init__(self) -> None:
        path = PurePosixPath(self.name)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"expected a file name below a folder, got {self.name!r}")
        if not self.urls or any(urlsplit(url).scheme not in ("http", "https") for url in self.urls):
            raise ValueError(f"expected http or https addresses for {self.name}, got {', '.join(self.urls) or 'none'}")
        kind, _, digits = self.checksum.partition(":")
        length = _ALGORITHMS.get(kind, ("", 0))[1]
        if kind not in _ALGORITHMS or len(digits) < 8 or len(digits) != (length or len(digits)):
            raise ValueError(f"expected sha256:, md5: or sha256-prefix: and hex digits, got {self.checksum!r}")

    def matches(self, path: Path) -> bool:
        return checksum_of(path, like=self.checksum) == self.checksum


def checksum_of(path: Path, *, like: str) -> str:
    """The checksum of a file, with the algorithm and the number of digits of `like`."""
    kind, _, digits = like.partition(":")
    with named_os_errors(path, "read"), path.open("rb") as stream:
        found = hashlib.file_digest(stream, _ALGORITHMS[kind][0]).hexdigest()
    return f"{kind}:{found[: len(digits)]}"


class _Interrupted(Exception):
    """This attempt failed; a retry may succeed."""


class _Refused(Exception):
    """This address does not serve the file; a mirror may."""


def fetch(
    file: RemoteFile,
    folder: Path,
    *,
    progress: ByteProgress | None = None,
    client: httpx.Client | None = None,
    force: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Download `file` into `folder` unless it is there, verify it, and return its path.

    An interrupted download is resumed. A file with another checksum is an error, unless `force` replaces it.
    """
    target = folder / file.name
    if target.exists():
        found = checksum_of(target, like=file.checksum)
        if found == file.checksum:
            return target
        if not force:
            raise ChecksumError(
                f"{target}: expected {file.checksum}, got {found}; the file is damaged or another version; "
                "replace it with --force, or move it away"
            )
    with named_os_errors(target.parent, "write to"):
        target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    connection = nullcontext(client) if client else httpx.Client(timeout=_TIMEOUT, follow_redirects=True)
    with _only_one_process(part), connection as session:
        _from_any_address(session, file, part, progress or (lambda done, total: None), sleep)
        with named_os_errors(target, "write to"):
            part.replace(target)
    return target


def _from_any_address(
    session: httpx.Client, file: RemoteFile, part: Path, progress: ByteProgress, sleep: Callable[[float], None]
) -> None:
    """Fill `part` with the verified file from the first address that serves it."""
    failures: list[str] = []
    wrong: str | None = None
    for url in file.urls:
        for attempt in range(_ATTEMPTS):
            if attempt:
                sleep(2.0 ** (attempt - 1))
            try:
                continued = _stream(session, file, url, part, progress)
            except _Interrupted as error:
                failure = f"{url}: {error}"
                continue
            except _Refused as error:
                failure = f"{url}: {error}"
                break
            found = checksum_of(part, like=file.checksum)
            if found == file.checksum:
                return
            part.unlink()
            failure = wrong = f"{url}: got {found}"
            if not continued:
                break
            # The bytes from an earlier download may be wrong: start again from the beginning.
        failures.append(failure)
    target = part.with_suffix("")
    if wrong:
        raise ChecksumError(f"{file.name}: expected {file.checksum}, got another file ({wrong}); try again later")
    raise DownloadError(
        f"cannot fetch {file.name} ({'; '.join(failures)}); check the network, "
        f"or get the file elsewhere and put it at {target}"
    )


def _stream(session: httpx.Client, file: RemoteFile, url: str, part: Path, progress: ByteProgress) -> bool:
    """Download to `part` from one address, once. Returns whether an earlier download was resumed."""
    have = part.stat().st_size if part.exists() else 0
    # Bytes as published: a transparent decompression of a .gz would break the checksum.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with session.stream("GET", url, headers=headers, follow_redirects=True) as response:
            if response.status_code == 416 and have:
                if not file.matches(part):
                    part.unlink()
                    raise _Interrupted("the partial file does not match the server's")
                return True
            _check_status(response.status_code)
            start = have if response.status_code == 206 else 0
            if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                part.unlink()
                raise _Interrupted(f"asked for the rest from byte {start}, got another part")
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else file.size
            # No chunk size: httpx would gather chunks and lose them when the connection is cut.
            _write(response.iter_raw(), part, start, total, file, progress)
            return start > 0
    except (httpx.UnsupportedProtocol, httpx.TooManyRedirects, httpx.InvalidURL) as error:
        raise _Refused(str(error) or type(error).__name__) from error
    except httpx.TransportError as error:
        raise _Interrupted(str(error) or type(error).__name__) from error


def _check_status(status: int) -> None:
    if status in _WORTH_RETRYING:
        raise _Interrupted(f"the server answered {status}")
    if status not in (200, 206):
        raise _Refused(f"the server answered {status}")


def _write(
    chunks: Iterator[bytes], part: Path, start: int, total: int | None, file: RemoteFile, progress: ByteProgress
) -> None:
    done = start
    progress(done, total)
    with named_os_errors(part, "write to"), part.open("ab" if start else "wb") as stream:
        for chunk in chunks:
            done += len(chunk)
            if file.size is not None and done > file.size:
                break
            stream.write(chunk)
            progress(done, total)
    if file.size is not None and done > file.size:
        part.unlink()
        raise _Refused(f"expected {file.size} bytes, got more")


@contextmanager
def _only_one_process(part: Path) -> Iterator[None]:
    """A lock: two processes that append to one partial file would corrupt it."""
    path = part.with_suffix(".lock")
    lock = filelock.FileLock(path)
    with named_os_errors(path, "write to"):
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            name = part.with_suffix("").name
            raise DownloadError(f"another process is fetching {name}; wait until it is done") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        lock.release()


@contextmanager
def named_os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError (full disk, read-only folder) into an error that names the path and what to do."""
    try:
        yield
    except OSError as error:
        raise LeaktightError(
            f"cannot {what} {path}: {error.strerror or error}; free the disk, change the permissions, "
            "or choose another data folder with LEAKTIGHT_DATA"
        ) from error
