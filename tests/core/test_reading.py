"""Which files are read, and which are refused before they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leaktight.core.errors import ConfigError
from leaktight.core.reading import MOST_TEXT, read_limited, read_toml


def pipe_with(content: bytes) -> Path:
    """A pipe as a shell makes one of `<(command)`."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    return Path(f"/dev/fd/{reader}")


def test_a_config_may_come_from_a_command_of_the_shell() -> None:
    path = pipe_with(b"seed = 3\n")
    assert read_toml(path, ConfigError) == {"seed": 3}
    assert read_toml(path, ConfigError) == {"seed": 3}, "commands read it twice"


def test_it_may_come_from_a_slow_command() -> None:
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, b"seed = ")
        os.close(reader)
        os.system("sleep 0.2")
        os.write(writer, b"4")
        os._exit(0)
    os.close(writer)
    assert read_toml(Path(f"/dev/fd/{reader}"), ConfigError) == {"seed": 4}


def test_a_command_without_an_end_is_cut_off() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        while True:
            try:
                os.write(writer, b"#" * 2**16)
            except BrokenPipeError:
                os._exit(0)
    os.close(writer)
    with pytest.raises(ConfigError, match="expected at most 1048576 characters"):
        read_toml(Path(f"/dev/fd/{reader}"), ConfigError)
    os.close(reader)
    os.waitpid(child, 0)


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="expected a regular file, got a pipe"):
        read_toml(tmp_path / "pipe", ConfigError)


def test_only_texts_come_from_pipes() -> None:
    with pytest.raises(ConfigError, match="expected a regular file, got a pipe"):
        read_limited(pipe_with(b"x"), MOST_TEXT, ConfigError)


def test_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a regular file"):
        read_toml(Path("/dev/zero"), ConfigError)
