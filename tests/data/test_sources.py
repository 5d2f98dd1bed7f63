from __future__ import annotations

import hashlib
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from leaktight.core.errors import ChecksumError, DataError, UsageError
from leaktight.data import sources
from leaktight.data.dataset import data_root
from leaktight.data.download import RemoteFile, checksum_of
from leaktight.data.published import SOURCES, Source
from leaktight.data.sources import differences, extract, prepare, verify

PLAIN = b"a published file"


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = tar_bytes({"inner/a": b"one", "inner/b": b"two", "readme": b"outside"})


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


PUBLISHED = {
    "plain": Source(
        description="one file",
        terms="none",
        folder="plain",
        files=(RemoteFile(name="p.bin", urls=("https://example.org/p.bin",), checksum=md5(PLAIN)),),
    ),
    "known": Source(
        description="an archive with checksums of its contents",
        terms="none",
        folder="known",
        archive=RemoteFile(name="x.tar.gz", urls=("https://example.org/x.tar.gz",), checksum=md5(ARCHIVE)),
        subtree="inner",
        contents={"a": md5(b"one"), "b": md5(b"two")},
    ),
    "opaque": Source(
        description="an archive alone",
        terms="none",
        folder="opaque",
        archive=RemoteFile(name="x.tar.gz", urls=("https://example.org/x.tar.gz",), checksum=md5(ARCHIVE)),
        subtree="inner",
    ),
    "manual": Source(description="by hand", terms="an agreement", folder="hand", manual="put it at {folder}/train"),
}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(sources, "SOURCES", PUBLISHED)


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=iter([{"/p.bin": PLAIN, "/x.tar.gz": ARCHIVE}[request.url.path]]))

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        yield client


@pytest.mark.parametrize("name", ["plain", "known", "opaque"])
def test_a_source_is_fetched_once_and_verified(name: str, client: httpx.Client, tmp_path: Path) -> None:
    assert verify(name, tmp_path).state == "missing"
    seen: list[tuple[str, int, int | None]] = []
    report = prepare(name, tmp_path, client=client, progress=lambda *step: seen.append(step))
    assert report.state == "ready"
    assert verify(name, tmp_path).state == "ready"
    assert {file for file, _, _ in seen} == {"p.bin" if name == "plain" else "x.tar.gz"}
    seen.clear()
    assert prepare(name, tmp_path, client=client, progress=lambda *step: seen.append(step)).state == "ready"
    assert seen == []


def test_an_archive_becomes_its_folder(client: httpx.Client, tmp_path: Path) -> None:
    prepare("known", tmp_path, client=client)
    assert sorted(path.name for path in (tmp_path / "known").iterdir()) == ["a", "b"]
    assert (tmp_path / "archives" / "x.tar.gz").read_bytes() == ARCHIVE


@pytest.mark.parametrize("name", ["known", "opaque"])
def test_damage_is_found_and_named_and_force_replaces_it(name: str, client: httpx.Client, tmp_path: Path) -> None:
    prepare(name, tmp_path, client=client)
    (tmp_path / name / "a").write_bytes(b"ONE")
    (tmp_path / name / "b").unlink()
    report = verify(name, tmp_path)
    assert report.state == "damaged"
    assert set(report.problems) == {"a", "b"}
    assert f"leaktight data {name} --force" in report.message
    with pytest.raises(DataError, match="is not as published"):
        prepare(name, tmp_path, client=client)
    assert prepare(name, tmp_path, client=client, force=True).state == "ready"
    assert verify(name, tmp_path).state == "ready"


def test_a_damaged_file_is_not_overwritten(client: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "plain" / "p.bin"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(ChecksumError, match="--force"):
        prepare("plain", tmp_path, client=client)
    assert path.read_bytes() == b"mine"


def test_without_its_archive_an_opaque_folder_is_used_but_not_verified(client: httpx.Client, tmp_path: Path) -> None:
    prepare("opaque", tmp_path, client=client)
    (tmp_path / "archives" / "x.tar.gz").unlink()
    report = prepare("opaque", tmp_path, client=client)
    assert report.state == "unchecked"
    assert report.usable
    (tmp_path / "archives" / "x.tar.gz").write_bytes(b"spoilt")
    assert verify("opaque", tmp_path).problems == {"archives/x.tar.gz": "differs"}


def test_by_hand_means_an_explanation(tmp_path: Path) -> None:
    report = prepare("manual", tmp_path)
    assert report.state == "missing"
    assert not report.usable
    assert report.message == f"manual: not at {tmp_path / 'hand'}; put it at {tmp_path / 'hand'}/train"
    (tmp_path / "hand" / "train").mkdir(parents=True)
    assert prepare("manual", tmp_path).state == "unchecked"


def test_a_missing_file_is_fetched_without_force(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine.txt").write_text("mine")
    assert verify("plain", tmp_path).message.endswith("p.bin is missing; fetch with `leaktight data plain`")
    assert prepare("plain", tmp_path, client=client).state == "ready"
    assert (tmp_path / "plain" / "mine.txt").exists()


def test_a_partial_download_does_not_count_as_present(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "p.bin.part").write_bytes(b"a pub")
    assert verify("plain", tmp_path).state == "missing"


def test_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        verify("plian", tmp_path)


def test_the_option_comes_before_the_environment_before_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEAKTIGHT_DATA", str(tmp_path / "environment"))
    assert data_root(tmp_path / "option") == tmp_path / "option"
    assert data_root() == tmp_path / "environment"
    monkeypatch.delenv("LEAKTIGHT_DATA")
    assert data_root().name == "leaktight"
    assert data_root().is_absolute()


def test_a_source_is_either_fetched_or_explained() -> None:
    with pytest.raises(ValueError, match="either files to fetch or an explanation"):
        Source(description="nothing", terms="", folder="x")


@pytest.mark.parametrize("name", SOURCES)
def test_every_real_source_is_complete(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    assert source.description
    assert source.terms
    assert "\n" not in source.description + source.terms + source.manual
    fetched = [*source.files, *([source.archive] if source.archive else [])]
    assert bool(fetched) != bool(source.manual)
    if source.manual:
        assert str(tmp_path / source.folder) in verify(name, tmp_path).message
    assert all(file.checksum and file.urls for file in fetched)


def test_the_real_sources_do_not_share_places() -> None:
    folders = [source.folder for source in SOURCES.values()]
    archives = [source.archive.name for source in SOURCES.values() if source.archive]
    assert len(set(folders)) == len(folders)
    assert len(set(archives)) == len(archives)
    assert {
        "mnist",
        "fashion_mnist",
        "cifar-10-batches-py",
        "tiny_imagenet",
        "lfw",
        "mjsynth",
        "iiit5k",
        "lpips_trunks",
        "weights_cifar10_resnet",
    } <= set(folders)


MD5_OF_TORCHVISION = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}


def test_real_mnist_is_as_published(real_data: Path) -> None:
    report = verify("mnist", real_data)
    assert report.state == "ready", report.message
    for name, checksum in MD5_OF_TORCHVISION.items():
        assert checksum_of(real_data / "mnist" / name, like=checksum) == checksum


def test_real_weights_are_as_published(real_data: Path) -> None:
    report = verify("cifar10_resnet", real_data)
    assert report.state == "ready", report.message


def test_real_files_that_are_there_are_as_published(real_data: Path) -> None:
    """CIFAR-10 and the LPIPS heads are there in part."""
    found = 0
    for name in ("cifar10", "lpips"):
        source = SOURCES[name]
        checksums = {file.name: file.checksum for file in source.files} | dict(source.contents)
        for file, checksum in checksums.items():
            path = real_data / source.folder / file
            if path.exists():
                assert checksum_of(path, like=checksum) == checksum, path
                found += 1
    assert found >= 5


FILES = {"top/a.txt": b"first", "top/deep/b.txt": b"second", "other/c.txt": b"third"}


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(tar_bytes(files))
    return path


def write_link(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        info = tarfile.TarInfo("top/link")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(info)
    return path


def write_zip_link(path: Path) -> Path:
    info = zipfile.ZipInfo("top/link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(info, "/etc/passwd")
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


Writer = Callable[[Path, dict[str, bytes]], Path]
BOTH = pytest.mark.parametrize("write", [write_zip, write_tar])


@BOTH
def test_everything_or_a_part_is_unpacked(write: Writer, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", FILES)
    assert tree(extract(archive, tmp_path / "new" / "all")) == FILES
    assert tree(extract(archive, tmp_path / "part", subtree="top")) == {"a.txt": b"first", "deep/b.txt": b"second"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "part", "x"]


@BOTH
def test_a_folder_that_is_there_is_replaced_only_by_force(write: Writer, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", FILES)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.txt").write_bytes(b"mine")
    with pytest.raises(DataError, match="--force"):
        extract(archive, folder)
    assert tree(folder) == {"mine.txt": b"mine"}
    assert tree(extract(archive, folder, force=True)) == FILES


@pytest.mark.parametrize("name", ["../out.txt", "top/../../out.txt", "/out.txt", "..\\out.txt", "C:/out.txt"])
def test_a_zip_cannot_write_outside(name: str, tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "x", {"top/a.txt": b"first", name: b"evil"})
    with pytest.raises(DataError, match="expected files inside the archive's own folder"):
        extract(archive, tmp_path / "inner" / "folder")
    assert list((tmp_path / "inner").iterdir()) == []


@pytest.mark.parametrize("name", ["../out.txt", "top/../../out.txt"])
def test_a_tar_cannot_write_outside(name: str, tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "x", {"top/a.txt": b"first", name: b"evil"})
    with pytest.raises(DataError, match="expected files inside the archive's own folder"):
        extract(archive, tmp_path / "inner" / "folder")
    assert list((tmp_path / "inner").iterdir()) == []


@pytest.mark.parametrize("write", [write_link, write_zip_link])
def test_links_to_the_outside_are_refused(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected files inside the archive's own folder"):
        extract(write(tmp_path / "x"), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@BOTH
def test_a_cut_archive_leaves_nothing(write: Writer, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", {"top/a.bin": bytes(range(256)) * 400})
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(DataError, match="expected a tar or zip archive, got a damaged file"):
        extract(archive, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "x", FILES)
    with pytest.raises(DataError, match="expected a folder 'cifar' in it"):
        extract(archive, tmp_path / "folder", subtree="cifar")


@BOTH
def test_differences_are_found(write: Writer, tmp_path: Path) -> None:
    archive = write(tmp_path / "x", FILES)
    folder = extract(archive, tmp_path / "folder")
    part = extract(archive, tmp_path / "part", subtree="top")
    assert differences(archive, folder) == []
    assert differences(archive, part, subtree="top") == []
    (folder / "top" / "a.txt").write_bytes(b"First")
    (folder / "other" / "c.txt").unlink()
    assert sorted(differences(archive, folder)) == ["other/c.txt", "top/a.txt"]
    (part / "deep" / "b.txt").write_bytes(b"second and more")
    assert differences(archive, part, subtree="top") == ["deep/b.txt"]
