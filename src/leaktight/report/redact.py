"""A run without pictures, names of clients, paths and error texts, for a page that can be filed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PureWindowsPath

import tomli_w
from markupsafe import Markup

from leaktight.core.reading import NotTomlError, parse_toml
from leaktight.report.runs import Run
from leaktight.results.schema import Moment, Summary, Tradeoff, Trial

CLIENT = "[client]"
LEFT_OUT = "[left out]"

_PLACES = frozenset(
    {
        "after",
        "before",
        "checkpoint",
        "data_root",
        "directory",
        "file",
        "folder",
        "out",
        "path",
        "root",
        "truth",
        "update",
    }
)
"""Settings that name files and folders."""
_PATH = re.compile(
    r"""(?<![\w/\\~.])(?:~|\.{1,2})?[/\\][^\s/\\'"<>|][^\s'"<>|]*|\b[A-Za-z]:\\[^\s'"<>|]*|\\\\[^\s\\'"<>|]+\\[^\s'"<>|]*"""
)
_FILE = re.compile(
    r"""[^\s/\\'"<>|()]+\.(?:bin|ckpt|csv|h5|hdf5|jpe?g|json|mat|npy|npz|onnx|parquet|pickle|pkl|png|pt|pth|py|"""
    r"""safetensors|tiff?|toml|txt|zip)\b""",
    re.IGNORECASE,
)
_COMMANDS = frozenset({"audit", "tradeoff", "inspect"})
_OPTION = re.compile(r"--?[a-z][a-z-]*")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")

Scrub = Callable[[str], str]


def redacted(run: Run) -> tuple[Run, Scrub]:
    """The run without what a page shows or quotes of it, and a function that removes the same from any text."""
    scrub = _scrubber(run)
    ids = {trial.id: f"trial-{number}" for number, trial in enumerate(run.trials, start=1)}
    bare = replace(
        run,
        path=Path("RUN"),
        summary=_summary(run.summary, ids, scrub),
        trials=tuple(_trial(trial, ids[trial.id]) for trial in run.trials),
        config=_config(run.config, scrub),
        environment=run.environment.model_copy(update={"command": ()}),
        command=_command(run.command),
    )
    return bare, scrub


def finalizer(scrub: Scrub) -> Callable[[object], object]:
    """A function for every value that a template shows. Markup is what templates made of such values."""

    def finalize(value: object) -> object:
        return scrub(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return finalize


def _scrubber(run: Run) -> Scrub:
    tables = _tables(run.config)
    clients = [trial.client for trial in run.trials]
    errors = [trial.error for trial in run.trials if trial.error] + list(run.summary.training_failed.values())
    places = [str(run.path), str(run.path.resolve()), run.summary.run, *_places(tables)]
    names = [PureWindowsPath(place).name for place in places]
    patterns = [
        (_any_of([*errors, *(error.rstrip(".") for error in errors)]), LEFT_OUT),
        (_any_of([*clients, *_targets(tables)]), CLIENT),
        (_any_of(each for each in [*places, str(Path.cwd()), str(Path.home())] if _is_place(each)), LEFT_OUT),
        (_PATH, LEFT_OUT),
        (_FILE, LEFT_OUT),
        (_any_of([*places, *names]), LEFT_OUT),
    ]

    def scrub(text: str) -> str:
        for pattern, instead in patterns:
            text = pattern.sub(instead, text)
        return text

    return scrub


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of these as a whole word. Bare numbers and signs cannot be told from other text."""
    named = {text for text in texts if re.search(r"[^\W\d_]", text)}
    joined = "|".join(re.escape(text) for text in sorted(named, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{joined})(?!\w)" if joined else r"(?!)")


def _trial(trial: Trial, name: str) -> Trial:
    hidden: dict[str, object] = {
        "id": name,
        "client": CLIENT,
        "error": LEFT_OUT if trial.error else None,
        "images": None,
        "labels": None,
        "examples": None,
        "attack_settings": {},
        "defense_settings": {},
        "warnings": (),
    }
    return trial.model_copy(update=hidden)


def _summary(summary: Summary, ids: Mapping[str, str], scrub: Scrub) -> Summary:
    cells = [
        cell.model_copy(update={"trial_ids": tuple(ids.get(each, "") for each in cell.trial_ids), "labels": None})
        for cell in summary.cells
    ]
    verdicts = [entry.model_copy(update={"trial_id": ids.get(entry.trial_id or "")}) for entry in summary.verdicts]
    tradeoff, moments = summary.tradeoff, summary.over_time
    return summary.model_copy(
        update={
            "run": "RUN",
            "command": "",
            "cells": tuple(cells),
            "verdicts": tuple(verdicts),
            "training_failed": dict.fromkeys(summary.training_failed, LEFT_OUT),
            "defenses": {name: _texts(settings, scrub) for name, settings in summary.defenses.items()},
            # charts are drawn from these, and not by a template
            "tradeoff": Tradeoff.model_validate(_texts(tradeoff.document(), scrub)) if tradeoff else None,
            "over_time": tuple(Moment.model_validate(_texts(each.document(), scrub)) for each in moments)
            if moments is not None
            else None,
        }
    )


def _texts(value: object, scrub: Scrub) -> object:
    """The value with all its texts scrubbed."""
    if isinstance(value, Mapping):
        return {key: _texts(item, scrub) for key, item in value.items()}
    if isinstance(value, list):
        return [_texts(item, scrub) for item in value]
    return scrub(value) if isinstance(value, str) else value


def _tables(config: str) -> dict[str, object]:
    try:
        return parse_toml(config, "config.toml", NotTomlError)
    except NotTomlError:
        return {}


def _config(config: str, scrub: Scrub) -> str:
    """The config without comments, places and clients; empty if it cannot be read."""
    tables = _without_places(_tables(config), scrub)
    assert isinstance(tables, dict)
    return tomli_w.dumps(tables)


def _without_places(value: object, scrub: Scrub) -> object:
    if isinstance(value, Mapping):
        return {
            scrub(key): LEFT_OUT if key in _PLACES and isinstance(item, str) else _without_places(item, scrub)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_without_places(item, scrub) for item in value]
    return (LEFT_OUT if _is_place(value) else scrub(value)) if isinstance(value, str) else value


def _is_place(text: str) -> bool:
    return "/" in text or "\\" in text or text.startswith("~") or _FILE.search(text) is not None


def _entries(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a config with the names of their settings."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item, key)
    elif isinstance(value, str):
        yield key, value


def _places(tables: object) -> list[str]:
    return [text for key, text in _entries(tables) if key in _PLACES or _is_place(text)]


def _targets(tables: object) -> list[str]:
    return [text for key, text in _entries(tables) if key == "targets"]


def _command(command: str) -> str:
    """The options of each command and their numbers; other arguments may be places.

    >>> _command("leaktight audit hospital.toml --trials 3 --set data.root=/home/me --json --seed=1")
    'leaktight audit [left out] --trials 3 --set [left out] --json --seed=1'
    """
    try:
        calls = [shlex.split(line) for line in command.splitlines()]
    except ValueError:
        return LEFT_OUT
    return "\n".join(" ".join(_argument(word, index) for index, word in enumerate(words)) for words in calls)


def _argument(word: str, index: int) -> str:
    if (index, word) == (0, "leaktight") or (index == 1 and word in _COMMANDS) or _NUMBER.fullmatch(word):
        return word
    name, equals, value = word.partition("=")
    if not _OPTION.fullmatch(name):
        return LEFT_OUT
    return word if _NUMBER.fullmatch(value) or not equals else f"{name}={LEFT_OUT}"
