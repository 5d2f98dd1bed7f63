from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.here import Here
from tests.results.made import THREAT, changed, made_cell, made_summary, made_training, made_trial

from leaktight.core.errors import ResultsError, UsageError
from leaktight.results.digest import MANIFEST
from leaktight.results.folder import RunFolder
from leaktight.results.lines import canonical, hashed
from leaktight.results.schema import Pictures, Summary, Verdict
from leaktight.results.store import open_store, read_summary
from leaktight.results.verify import doubt, verify

OLD = Path(__file__).parent / "old"
TRIALS = 4
Change = Callable[[Path], None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


def finished(path: Path, *, order: int = 1) -> Path:
    """A finished run. order: -1 for the trials backwards."""
    path.mkdir(parents=True)
    for name, text in (("config.toml", "seed = 0\n"), ("environment.json", "{}"), ("command.txt", "leaktight audit\n")):
        (path / name).write_text(text)
    store = open_store(path)
    for number in range(TRIALS)[::order]:
        pictures = Pictures(
            truth=f"images/{number}-truth.png", guess=f"images/{number}-guess.png", size=(8, 8), count=1
        )
        made = made_trial(trial=number, images=pictures)
        store.add(made, {f"images/{number}-truth.png": b"truth", f"images/{number}-guess.png": b"guess"})
    verdict = Verdict(defense="none", threat=THREAT, verdict="reconstructed", because="it was")
    written = RunFolder(path).write_summary(made_summary(made_cell(), run="runs/made", verdicts=(verdict,)))
    assert read_summary(path) == written
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished(tmp_path / "run")


def test_a_run_as_it_was_written_verifies(run: Path, here: Here) -> None:
    found = verify(run)
    assert (found.trials, found.pictures, found.differences) == (TRIALS, 2 * TRIALS, ())
    code, out, err = here("verify", "run")
    assert (code, err) == (0, "")
    assert out == f"verified: 4 trials and 8 pictures, digest {found.digest}\n"
    code, out, _ = here("verify", "run", "--json")
    assert code == 0
    assert json.loads(out)["verified"] is True


def test_the_digest_is_that_of_the_content_alone(tmp_path: Path, run: Path) -> None:
    digest = verify(run).digest
    assert verify(finished(tmp_path / "elsewhere", order=-1)).digest == digest, "the order of trials does not matter"
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(dict(reversed(summary.items()))))
    lines = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    (run / "trials.jsonl").write_text("".join(json.dumps(line, indent=None) + "\n\n" for line in lines))
    (run / "report.html").write_text("derived")
    (run / MANIFEST).unlink()
    assert verify(run).differences == (), "nor does the form of a file, and the hashes can be made again"
    assert verify(run).digest == digest


def test_the_digest_is_made_as_documented(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    digest = summary.pop("digest")
    lines = (json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines())
    pictures = (*(f"images/{at}-{kind}.png" for at in range(TRIALS) for kind in ("truth", "guess")),)
    hashes = {
        "files": {
            name: hashed((run / name).read_bytes()) for name in ("config.toml", "environment.json", "command.txt")
        },
        "trials": {line["id"]: hashed(canonical(line)) for line in lines},
        "pictures": {name: hashed((run / name).read_bytes()) for name in pictures},
        "summary": hashed(canonical(summary)),
    }
    assert json.loads((run / MANIFEST).read_text()) == hashes
    assert digest == hashed(canonical(hashes))


def edited(name: str, change: Callable[[str], str]) -> Change:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert change(text) != text
        (run / name).write_text(change(text))

    return edit


def removed(name: str) -> Change:
    return lambda run: (run / name).unlink()


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


def another_line(text: str) -> str:
    return text + text.splitlines()[0].replace("t000", "t009") + "\n"


def same_id_again(text: str) -> str:
    return text + text.splitlines()[0].replace('"loss": 0.1', '"loss": 0.2') + "\n"


TAMPERED: dict[str, tuple[Change, str]] = {
    "score": (edited("trials.jsonl", replaced("[0.5]", "[0.4]")), "trial none.csdlg.t000.r000: changed"),
    "unknown field": (edited("trials.jsonl", replaced("{", '{"more": 1, ')), "trial none.csdlg.t000.r000: changed"),
    "line removed": (edited("trials.jsonl", lambda text: text[text.index("\n") + 1 :]), "t000.r000: missing"),
    "line added": (edited("trials.jsonl", another_line), "trial none.csdlg.t009.r000: added"),
    "same id again": (edited("trials.jsonl", same_id_again), "trial none.csdlg.t000.r000: changed"),
    "torn": (edited("trials.jsonl", lambda text: text + '{"id":'), "trials.jsonl: an incomplete last line"),
    "end cut": (edited("trials.jsonl", lambda text: text[:-1]), "t003.r000: missing"),
    "all trials": (removed("trials.jsonl"), "trial none.csdlg.t002.r000: missing"),
    "picture": (edited("images/1-guess.png", lambda text: text + " "), "picture images/1-guess.png: changed"),
    "picture removed": (removed("images/2-truth.png"), "picture images/2-truth.png: missing"),
    "verdict": (edited("summary.json", replaced("reconstructed", "nothing-found")), "summary.json: changed"),
    "unknown fact": (edited("summary.json", replaced("{", '{"more": 1,')), "summary.json: changed"),
    "config": (edited("config.toml", replaced("0", "1")), "config.toml: changed"),
    "config removed": (removed("config.toml"), "config.toml: missing"),
    "command": (edited("command.txt", replaced("audit", "audit --trials 50")), "command.txt: changed"),
    "environment": (edited("environment.json", replaced("{", '{"python": "3.9"')), "environment.json: changed"),
    "digest": (edited("summary.json", lambda text: re.sub('"digest": "..', '"digest": "zz', text)), "does not belong"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_every_kind_of_change_is_noticed_and_named(name: str, run: Path, here: Here) -> None:
    change, told = TAMPERED[name]
    change(run)
    code, out, err = here("verify", "run")
    assert (code, out) == (1, "")
    assert err.startswith("run is not as it was written:\n")
    assert told in err
    code, out, err = here("verify", "run", "--json")
    document = json.loads(out)
    assert (code, err, document["verified"]) == (1, "", False)
    assert any(told in each for each in document["differences"])
    assert "run was changed after it was written" in (doubt(Path("run")) or "")


def test_a_digest_that_was_removed_is_a_change(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    del summary["digest"]
    (run / "summary.json").write_text(json.dumps(summary))
    assert verify(run).differences == ("summary.json: the digest was removed",)


@pytest.mark.parametrize("hashes", [None, "{", '{"files": {}}'])
def test_without_its_hashes_a_change_is_noticed_though_not_named(hashes: str | None, run: Path) -> None:
    (run / MANIFEST).unlink()
    if hashes is not None:
        (run / MANIFEST).write_text(hashes)
    assert verify(run).differences == ()
    (run / "images/0-guess.png").write_bytes(b"other")
    (found,) = verify(run).differences
    assert f"{MANIFEST}, which tells what was changed, is missing or damaged" in found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_value_of_any_field_is_noticed(data: st.DataObject, tmp_path: Path) -> None:
    original = tmp_path / "original"
    if not original.exists():
        finished(original)
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    file = data.draw(st.sampled_from(["summary.json", "trials.jsonl"]))
    lines = [
        json.loads(line) for line in (copy / file).read_text().split("\n" if file == "trials.jsonl" else "\0") if line
    ]
    line = data.draw(st.sampled_from(lines))
    holder, key = data.draw(st.sampled_from(list(leaves(line))))
    old = holder[key]
    holder[key] = data.draw(values(old).filter(lambda value: canonical(value) != canonical(old)))
    (copy / file).write_text("".join(json.dumps(each) + "\n" for each in lines))
    with contextlib.suppress(UsageError):  # a value that the field cannot have
        assert verify(copy).differences


def leaves(content: Any) -> Any:
    """Every place of a single value in a document: what holds it, and its key there."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield content, key


def values(old: object) -> st.SearchStrategy[object]:
    if isinstance(old, bool):
        return st.booleans()
    if isinstance(old, float):
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(old, int):
        return st.integers()
    return st.text() | st.none()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shutil.rmtree, "expected the folder of a run, got run"),
        (removed("summary.json"), "is not finished and has no digest yet; continue it.*--resume --out run"),
        (edited("summary.json", lambda text: text[:40]), "summary.json: Invalid JSON"),
        (
            edited("summary.json", replaced('"schema_version": 2', '"schema_version": 3')),
            "written by a later Leaktight",
        ),
        (edited("trials.jsonl", replaced('"schema_version": 2', '"schema_version": 3')), "line 1.*a later Leaktight"),
        (edited("trials.jsonl", replaced('"id"', "rubbish")), "trials.jsonl, line 1: Invalid JSON"),
        (
            edited("trials.jsonl", replaced("{", '{"more": ' + "9" * 5000 + ", ")),
            "trials.jsonl, line 1: Invalid JSON: number",
        ),
        (edited("summary.json", replaced('"schema_version": 2', '"schema_version": 1')), "made by an earlier version"),
    ],
)
def test_what_cannot_be_checked_is_bad_usage(change: Change, told: str, run: Path, here: Here) -> None:
    change(run)
    with pytest.raises(UsageError, match=told):
        verify(Path("run"))
    code, out, err = here("verify", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert doubt(Path("run")) is None


def test_runs_of_other_kinds_and_earlier_versions_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no digest; run `leaktight report .*` to read it"):
        verify(OLD / "audit")
    with pytest.raises(ResultsError, match="training run"):
        verify(OLD / "train")
    with pytest.raises(UsageError, match="is not a run"):
        verify(tmp_path)
    RunFolder(tmp_path).write_training(made_training(0.5, [1.0]))
    with pytest.raises(ResultsError, match="training run"):
        verify(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_pictures_outside_of_the_folder_are_not_read(tmp_path: Path, run: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    store = open_store(run)
    outside = Pictures(truth="../secret.png", guess="images/\0", size=(8, 8), count=1)
    store.add(made_trial(trial=9, images=outside), {})
    summary = read_summary(run)
    assert isinstance(summary, Summary)
    RunFolder(run).write_summary(changed(summary, digest=None))
    assert json.loads((run / MANIFEST).read_text())["pictures"]["../secret.png"] is None
    assert verify(run).differences == ()


def test_names_from_a_file_do_not_control_the_terminal(run: Path, here: Here) -> None:
    edited("trials.jsonl", replaced("none.csdlg.t000", "\\u001b[2Jall is well"))(run)
    _, _, err = here("verify", "run")
    assert "\x1b" not in err
    assert "trial ?[2Jall is well.r000: added" in err
