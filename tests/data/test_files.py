from __future__ import annotations

import gzip
import tarfile
import zipfile
from pathlib import Path

import pytest

from leaktight.core import reading
from leaktight.core.errors import DataError
from leaktight.data.archives import unpack
from leaktight.data.files import find_source, open_tree, user_path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_folder_and_zip_look_the_same(tmp_path: Path) -> None:
    files = {"b/2.txt": b"two", "a/1.txt": b"one", ".hidden": b"", "__MACOSX/a/1.txt": b"", "a/._1.txt": b""}
    for name, data in files.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(data)
    write_zip(tmp_path / "pack.zip", files)
    for source in (tmp_path / "folder", tmp_path / "pack.zip"):
        with open_tree(source) as tree:
            assert tree.names == ("a/1.txt", "b/2.txt")
            assert tree.read("b/2.txt") == b"two"
            assert tree.text("a/1.txt") == "one"
            assert tree.has("a/1.txt")
            assert not tree.has("a")
            with pytest.raises(DataError, match=r"nope\.txt: expected"):
                tree.read("nope.txt")


@pytest.mark.parametrize("name", ["../x.png", "/etc/x.png", "a/../../x.png", "C:/x.png", "a\\..\\x.png", "."])
def test_paths_out_of_a_zip_are_refused(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "bad.zip", {name: b"x"})
    with pytest.raises(DataError, match="expected names inside the zip"), open_tree(path):
        pass


@pytest.mark.parametrize(
    "name",
    ["Screenshot 9.41\u202fAM.png", "caf\xe9\xa0noir.png", "\u72ac\u3000\u732b.png", "\u0645\u06cc\u200c\u06a9.png"],
)
def test_names_of_all_scripts_are_names(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "pack.zip", {f"a/{name}": b"x"})
    with open_tree(path) as tree:
        assert tree.names == (f"a/{name}",)
    unpack(path, tmp_path / "new")
    assert (tmp_path / "new" / "a" / name).read_bytes() == b"x"


@pytest.mark.parametrize(
    "name", ["a\u202egnp.exe", "a\x1b[2J.png", "a\u200b.png", "a\n.png", "a\u2028.png", "\ufeffa.png"]
)
def test_names_that_show_another_name_are_refused(tmp_path: Path, name: str) -> None:
    path = write_zip(tmp_path / "bad.zip", {name: b"x"})
    with pytest.raises(DataError, match="expected names inside the zip"), open_tree(path):
        pass
    with pytest.raises(DataError, match="do not trust this file"):
        unpack(path, tmp_path / "new")


def test_a_member_without_a_name_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "bad.zip", {"x": b"x"})
    with zipfile.ZipFile(path) as archive:
        (listed,) = archive.infolist()
    content = bytearray(path.read_bytes())
    content[listed.header_offset + 30] = 0  # names end at a zero byte
    content[content.rindex(b"PK\x01\x02") + 46] = 0
    path.write_bytes(content)
    with pytest.raises(DataError, match="expected names inside the zip"), open_tree(path):
        pass
    with pytest.raises(DataError, match="expected files inside the archive"):
        unpack(path, tmp_path / "new")


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_headers_count_as_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    monkeypatch.setattr(reading, "MOST_UNPACKED", 2**18)
    path = tmp_path / "headers.tar.gz"
    with gzip.open(path, "wb") as file:
        for number in range(1000):
            info = tarfile.TarInfo(f"d/{number if kind == tarfile.REGTYPE else ''}")
            info.type = kind
            file.write(info.tobuf())
        file.write(bytes(1024))
    monkeypatch.setattr(reading, "MOST_RATIO", 1)
    with pytest.raises(DataError, match="in a file of its size"):
        unpack(path, tmp_path / "new")
    assert len(list(tmp_path.rglob("*"))) < 100


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "bomb.zip", {"a.bmp": bytes(8 * 2**20)})
    with pytest.raises(DataError, match=r"a\.bmp: expected at most .* do not trust this file"), open_tree(path):
        pass


def test_what_is_no_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK, but not really")
    with pytest.raises(DataError, match=r"a\.zip: expected a folder or a zip"), open_tree(path):
        pass


def test_damaged_members_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"something to damage")
    path.write_bytes(path.read_bytes().replace(b"something", b"anything!"))
    with open_tree(path) as tree, pytest.raises(DataError, match=r"a\.zip/a\.txt: expected an undamaged member"):
        tree.read("a.txt")


def test_text_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with open_tree(tmp_path) as tree, pytest.raises(DataError, match=r"a\.txt: expected text in UTF-8"):
        tree.text("a.txt")


def test_find_source_prefers_what_is_unpacked(tmp_path: Path) -> None:
    zipped = write_zip(tmp_path / "set" / "pack.zip", {"a": b""})
    assert find_source(tmp_path, "set", ("set",), "x") == zipped
    (tmp_path / "set" / "train").mkdir()
    assert find_source(tmp_path, "set", ("set",), "x") == tmp_path / "set"


def test_find_source_takes_a_zip_beside(tmp_path: Path) -> None:
    zipped = write_zip(tmp_path / "other.zip", {"a": b""})
    assert find_source(tmp_path, "set", ("set", "other"), "x") == zipped


def test_find_source_does_not_guess(tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        write_zip(tmp_path / "set" / name, {"a": b""})
    with pytest.raises(DataError, match=r"expected one zip, got a\.zip, b\.zip"):
        find_source(tmp_path, "set", ("set",), "x")


def test_missing_names_place_files_and_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_source(tmp_path, "lfw", ("lfw", "lfw2"), "some files")
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(tmp_path / "lfw"), str(tmp_path / "lfw2"), "some files", "`leaktight data lfw`"):
        assert part in message


def test_user_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "root" / "below").mkdir(parents=True)
    assert user_path("here", tmp_path / "root") == Path("here")
    assert user_path("below", tmp_path / "root") == tmp_path / "root" / "below"
    assert user_path(str(tmp_path / "here"), tmp_path) == tmp_path / "here"
    with pytest.raises(DataError, match="found nothing; set path"):
        user_path("nowhere", tmp_path)
