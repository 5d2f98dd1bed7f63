from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from leaktight.core.errors import DataError
from leaktight.data.archives import differences, extract

FILES = {"top/a.txt": b"first", "top/deep/b.txt": b"second", "other/c.txt": b"third"}


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
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


def test_another_archive_is_told_from_the_expected_one(tmp_path: Path) -> None:
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
