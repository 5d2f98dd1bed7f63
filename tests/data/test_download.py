from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import filelock
import httpx
import pytest

from leaktight.core.errors import ChecksumError, DownloadError, LeaktightError
from leaktight.data.download import RemoteFile, checksum_of, fetch

CONTENT = hashlib.shake_128(b"content").digest(300_000)
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """A server on this machine. Paths choose how it behaves; `requests` records (path, Range header)."""

    address: str
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    encodings: set[str | None] = field(default_factory=set)

    def url(self, path: str) -> str:
        return f"{self.address}/{path}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        wanted = self.headers.get("Range")
        earlier = self.site.paths().count(path)
        self.site.requests.append((path, wanted))
        self.site.encodings.add(self.headers.get("Accept-Encoding"))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if path == "moved":
            self.answer(302, b"", {"Location": "/good"})
        elif path == "astray":
            self.answer(302, b"", {"Location": "file:///etc/passwd"})
        elif path == "gone":
            self.answer(404, b"no such file")
        elif path == "busy" and earlier < 2:
            self.answer(503, b"later")
        elif path == "corrupt":
            self.answer(200, CONTENT[:-1] + b"?")
        elif path == "ignores-range" or not wanted:
            self.answer(200, CONTENT, cut_at=100_000 if path in ("cut", "always-cut") else None)
        elif start >= len(CONTENT):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(CONTENT)}"})
        elif path == "wrong-part":
            self.answer(206, CONTENT[1:], {"Content-Range": f"bytes 1-{len(CONTENT) - 1}/{len(CONTENT)}"})
        else:
            span = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
            self.answer(206, CONTENT[start:], {"Content-Range": span}, cut_at=10 if path == "always-cut" else None)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut_at: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        if self.path == "/packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body[:cut_at])


@pytest.fixture
def site() -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_address[1]
    where = Site(f"http://127.0.0.1:{port}")
    server.RequestHandlerClass = type("Bound", (Handler,), {"site": where})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield where
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=20) as client:
        yield client


def remote(*urls: str, checksum: str = SHA256, size: int | None = None) -> RemoteFile:
    return RemoteFile(name="sub/data.bin", urls=urls, checksum=checksum, size=size)


def no_sleep(seconds: float) -> None:
    """Do not wait between attempts."""


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "data.bin")


@pytest.mark.parametrize("path", ["good", "moved", "packed"])
def test_a_file_arrives_whole_and_nothing_else_stays(
    site: Site, client: httpx.Client, tmp_path: Path, path: str
) -> None:
    seen: list[tuple[int, int | None]] = []
    got = fetch(
        remote(site.url(path)), tmp_path, client=client, progress=lambda done, total: seen.append((done, total))
    )
    assert got == tmp_path / "sub" / "data.bin"
    assert got.read_bytes() == CONTENT
    assert site.encodings == {"identity"}
    assert leftovers(tmp_path) == []
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_without_a_client_one_is_made(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert fetch(remote(site.url("good")), tmp_path).read_bytes() == CONTENT


def test_a_verified_file_is_not_fetched_again(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    for _ in range(2):
        fetch(remote(site.url("good")), tmp_path, client=client)
    assert site.paths() == ["good"]


@pytest.mark.parametrize(
    "checksum", [f"md5:{hashlib.md5(CONTENT).hexdigest()}", f"sha256-prefix:{SHA256.removeprefix('sha256:')[:8]}"]
)
def test_other_checksums(site: Site, client: httpx.Client, tmp_path: Path, checksum: str) -> None:
    path = fetch(remote(site.url("good"), checksum=checksum), tmp_path, client=client)
    assert checksum_of(path, like=checksum) == checksum
    wrong = checksum[:-1] + ("0" if checksum[-1] != "0" else "1")
    with pytest.raises(ChecksumError):
        fetch(remote(site.url("good"), checksum=wrong), tmp_path / "b", client=client)


def test_a_cut_connection_is_resumed(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    waits: list[float] = []
    path = fetch(remote(site.url("cut")), tmp_path, client=client, sleep=waits.append)
    assert path.read_bytes() == CONTENT
    assert site.requests == [("cut", None), ("cut", "bytes=100000-")]
    assert waits == [1.0]


def test_a_part_from_an_earlier_run_is_continued(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    file = remote(site.url("always-cut"), site.url("gone"))
    with pytest.raises(DownloadError):
        fetch(file, tmp_path, client=client, sleep=no_sleep)
    part = tmp_path / "sub" / "data.bin.part"
    assert part.read_bytes() == CONTENT[:100_030]
    fetch(remote(site.url("good")), tmp_path, client=client, sleep=no_sleep)
    assert site.requests[-1] == ("good", "bytes=100030-")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "before", "num_requests"),
    [
        ("ignores-range", CONTENT[:500], 1),
        ("wrong-part", CONTENT[:500], 2),
        ("good", b"remains of something else", 2),
        ("good", CONTENT, 1),
        ("good", CONTENT + b"too much", 2),
    ],
)
def test_remains_that_do_not_fit_are_replaced(
    site: Site, client: httpx.Client, tmp_path: Path, path: str, before: bytes, num_requests: int
) -> None:
    part = tmp_path / "sub" / "data.bin.part"
    part.parent.mkdir()
    part.write_bytes(before)
    assert fetch(remote(site.url(path)), tmp_path, client=client, sleep=no_sleep).read_bytes() == CONTENT
    assert len(site.requests) == num_requests


def test_wrong_content_is_deleted_and_named(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    got = hashlib.sha256(CONTENT[:-1] + b"?").hexdigest()
    with pytest.raises(ChecksumError, match=f"expected {SHA256}, got .*{got}"):
        fetch(remote(site.url("corrupt")), tmp_path, client=client, sleep=no_sleep)
    assert site.paths() == ["corrupt"]
    assert list(tmp_path.rglob("*.bin*")) == []


def test_mirrors_are_tried_in_order(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    addresses = [site.url(path) for path in ("gone", "corrupt", "astray", "good", "moved")]
    assert fetch(remote(*addresses), tmp_path, client=client, sleep=no_sleep).read_bytes() == CONTENT
    assert site.paths() == ["gone", "corrupt", "astray", "good"]


def test_a_busy_server_is_asked_again_with_longer_waits(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    waits: list[float] = []
    fetch(remote(site.url("busy")), tmp_path, client=client, sleep=waits.append)
    assert waits == [1.0, 2.0]


def test_no_network_says_what_to_put_where(tmp_path: Path) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Name or service not known")

    waits: list[float] = []
    with (
        httpx.Client(transport=httpx.MockTransport(unreachable)) as client,
        pytest.raises(DownloadError, match="Name or service not known") as caught,
    ):
        fetch(remote("https://example.org/data.bin"), tmp_path, client=client, sleep=waits.append)
    assert f"put it at {tmp_path / 'sub' / 'data.bin'}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert waits == [1.0, 2.0, 4.0]


def test_a_time_out_is_tried_again(tmp_path: Path) -> None:
    answers = iter([httpx.ReadTimeout("too slow"), None])

    def slow(request: httpx.Request) -> httpx.Response:
        error = next(answers)
        if error:
            raise error
        return httpx.Response(200, content=iter([CONTENT]))

    with httpx.Client(transport=httpx.MockTransport(slow)) as client:
        assert fetch(remote("https://example.org/x"), tmp_path, client=client, sleep=no_sleep).read_bytes() == CONTENT


def test_a_damaged_file_is_replaced_only_by_force(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    with pytest.raises(ChecksumError, match="--force"):
        fetch(remote(site.url("good")), tmp_path, client=client)
    assert path.read_bytes() == b"damaged"
    assert fetch(remote(site.url("good")), tmp_path, client=client, force=True).read_bytes() == CONTENT


def test_a_failed_replacement_keeps_the_old_file(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "data.bin"
    path.parent.mkdir()
    path.write_bytes(b"old")
    with pytest.raises(DownloadError):
        fetch(remote(site.url("gone")), tmp_path, client=client, force=True)
    assert path.read_bytes() == b"old"


def test_more_bytes_than_published_are_cut_off(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="expected 1000 bytes, got more"):
        fetch(remote(site.url("good"), size=1000), tmp_path, client=client, sleep=no_sleep)
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "sub").write_text("a file, not a folder")
    with pytest.raises(LeaktightError, match=r"cannot write to .*sub.*LEAKTIGHT_DATA"):
        fetch(remote(site.url("good")), tmp_path, client=client)


def test_a_full_disk_is_named_and_the_part_stays(
    site: Site, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(LeaktightError, match="No space left on device; free the disk"):
        fetch(remote(site.url("good")), tmp_path, client=client, sleep=no_sleep)
    assert leftovers(tmp_path) == []


def test_two_processes_do_not_write_one_file(site: Site, client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with (
        filelock.FileLock(tmp_path / "sub" / "data.bin.lock"),
        pytest.raises(DownloadError, match=r"another process is fetching data\.bin"),
    ):
        fetch(remote(site.url("good")), tmp_path, client=client)
    assert fetch(remote(site.url("good")), tmp_path, client=client).read_bytes() == CONTENT


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/x", "/etc/passwd", ""])
def test_only_web_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="expected http or https"):
        remote(url)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a/../../b"])
def test_only_names_below_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="expected a file name below a folder"):
        RemoteFile(name=name, urls=("https://example.org/x",), checksum=SHA256)


@pytest.mark.parametrize("checksum", ["", "sha256:abc", "crc32:12345678", SHA256 + "0", "sha256-prefix:abc"])
def test_only_known_checksums(checksum: str) -> None:
    with pytest.raises(ValueError, match="expected sha256:, md5: or sha256-prefix:"):
        remote("https://example.org/x", checksum=checksum)
