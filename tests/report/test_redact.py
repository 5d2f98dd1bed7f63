"""The redacted page: a run whose clients, pictures and places are recognisable, and none of them in the page."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path

import pytest
from tests.report.made_run import MadeRun
from tests.report.reading import Page
from tests.results.made import changed

from leaktight.cli import app as cli
from leaktight.core.files import write_atomically
from leaktight.report.html import render_redacted, write_report
from leaktight.report.runs import load_run

CLIENT = "Klinik Nord & Söhne"
OTHER = "ward_seven"
ROOT = "/srv/hospital data/scans"
ERROR = f"client {OTHER!r} sent values from {ROOT}/a.npz that are not finite."
SECRETS = ("Klinik", "Söhne", "S&#246;hne", OTHER, "hospital", "/srv", "scans", "weights.pt", "private", "Zephyr")
"""Parts of what must not be in the page."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    made = MadeRun(tmp_path_factory.mktemp("private") / "Zephyr-run", client=CLIENT).add_all().add_production()
    made.add("precode", "inverting_gradients", 4, 0.0, error=ERROR)
    for position, trial in enumerate(made.trials):
        made.trials[position] = changed(
            trial, id=f"{trial.id}.{CLIENT}", attack_settings={"path": f"{ROOT}/generator.pt"}, warnings=(ERROR,)
        )
    made.write()
    content = made.content(tradeoff=True, over_time=True)
    content["scenario"] |= {"data": f"{ROOT}: 10 examples", "file": "Zephyr-weights.pt minus before.npz", "who": CLIENT}
    content["verdicts"][1]["because"] = f"every trial failed: {ERROR}"
    places = ("~/private/notes", r"C:\private\notes", r"\\server\private\notes", "../private/notes", "(/private/notes)")
    content["verdicts"][2]["advice"] = (
        f"Look at {CLIENT}, or at {' and '.join(places)}, at 0.24 / 12.7 dB and/or 3 s/round."
    )
    content["verdicts"][2]["attackers"][0]["because"] = f"{CLIENT} leaks most."
    content["answer"]["how_sure"] = f"See {made.path}."
    content["flags"][1]["detail"] = ERROR
    content["training_failed"] = {"outpost": f"{OTHER} did not answer"}
    content["tradeoff"]["rows"][1]["defense"] = f"gaussian_noise({ROOT}/noise.npy)"
    content["command"] = f"leaktight audit {ROOT}/audit.toml"
    content["ledger"]["assumed"] = [f"as in {ROOT}/notes.txt"]
    write_atomically(made.path / "summary.json", json.dumps(content))
    config = f'seed = 7\n# by {CLIENT}\n[data]\nkind = "image_folder"\nroot = "{ROOT}"\n'
    config += f'[audit]\ntargets = ["{CLIENT}", "{OTHER}"]\n'
    config += '[model]\nkind = "my_private:net"\nweights = "private/weights.pt"\n'
    write_atomically(made.path / "config.toml", config)
    command = f"leaktight audit {made.path}/audit.toml --trials 3 --out Zephyr-run --set 'data.root={ROOT}' --seed=7\n"
    write_atomically(made.path / "command.txt", command)
    return made


@pytest.fixture(scope="module")
def text(made: MadeRun) -> str:
    return render_redacted(load_run(made.path))


def test_the_whole_page_shows_what_the_redacted_one_must_not(made: MadeRun) -> None:
    whole = html.unescape(write_report(made.path).read_text())
    hidden = [part for part in SECRETS if part not in whole]
    assert hidden == ["S&#246;hne"]
    assert "data:image/png" in whole


def test_no_name_and_no_place_is_anywhere_in_the_page(made: MadeRun, text: str) -> None:
    found = [part for part in SECRETS if part in text or part in html.unescape(text)]
    assert found == ["private"]  # the module of a class of the user's own
    assert set(re.findall(r"\S*private\S*", html.unescape(text))) == {'"my_private:net"'}
    for place in (str(made.path), str(made.path.parent), str(Path.home()), str(Path.cwd())):
        assert place not in text


def test_no_picture_is_anywhere_in_the_page(made: MadeRun, text: str) -> None:
    assert "data:image" not in text
    assert Page(text).all("img") == []
    for file in (made.path / "images").iterdir():
        assert file.name not in text
        assert base64.b64encode(file.read_bytes()[60:120]).decode()[4:-4] not in text


def test_the_page_is_sound_and_keeps_the_findings(made: MadeRun, text: str) -> None:
    page = Page(text)
    assert page.faults == []
    assert len(page.ids) == len(set(page.ids))
    targets = [attributes["href"] or "" for attributes in page.all("a")]
    assert {target for target in targets if target[1:] not in page.ids} == set()
    run = load_run(made.path)
    assert run.summary.answer is not None
    assert page.text("h1") == run.summary.answer.leaks
    assert run.summary.verdicts[0].because in page.text("verdicts")
    assert "SSIM 1.00" in page.text("verdicts")
    assert "at 0.24 / 12.7 dB and/or 3 s/round." in page.text("verdicts")
    assert "3 of 3 reconstructed" in page.text("matrix")
    assert "Redacted." in page.text("header")
    assert run.summary.digest is not None
    assert run.summary.digest in page.text("header")
    assert "[left out]" in page.text("flags")
    how = page.text("reproduce")
    assert "leaktight audit [left out] --trials 3 --out [left out] --set [left out] --seed=7" in how
    assert "seed = 7" in how
    assert 'root = "[left out]"' in how
    assert 'weights = "[left out]"' in how
    assert "leaktight report RUN --redact" in how


def test_clients_with_numbers_for_names_leave_the_figures_alone(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", client="0")
    made.add("none", "csdlg", 0, 0.1)
    made.add("none", "prior_only", 0, 1.0, role="control")
    page = Page(render_redacted(load_run(made.finish())))
    assert "[client], round 0, trial 0" in page.text("verdicts")
    assert "of 100; by chance" in page.text("matrix")


@pytest.mark.parametrize("finished", [True, False])
def test_runs_of_an_earlier_version_and_unfinished_ones_are_redacted_too(tmp_path: Path, finished: bool) -> None:
    made = MadeRun(tmp_path / "Zephyr", client=CLIENT).add_all()
    if finished:
        content = made.content() | {"schema_version": 1}
        del content["answer"]
        for entry in content["verdicts"]:
            del entry["attackers"]
        write_atomically(made.path / "summary.json", json.dumps(content))
    text = render_redacted(load_run(made.path))
    assert Page(text).faults == []
    assert [part for part in SECRETS if part in html.unescape(text)] == []
    assert "data:image" not in text


def test_a_config_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    write_atomically(made.path / "config.toml", f"root = {ROOT}")
    write_atomically(made.path / "command.txt", "leaktight audit 'hospital")
    text = render_redacted(load_run(made.finish()))
    assert "hospital" not in text
    assert "[left out]" in Page(text).text("reproduce")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["leaktight", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_the_command_writes_the_page_beside_the_whole_one(
    made: MadeRun, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, made.path, "--redact") == 0
    path = made.path / "report-redacted.html"
    assert f"report: {path}" in capsys.readouterr().out
    assert path.read_text() == text
    assert run(monkeypatch, made.path, "--redact", "--out", tmp_path / "filed.html") == 0
    assert (tmp_path / "filed.html").read_text() == text


def test_tables_and_comparisons_are_not_redacted(
    made: MadeRun, finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, got in (((made.path, "--format", "csv"), "--format csv"), ((made.path, finished_run), "2 runs")):
        assert run(monkeypatch, *arguments, "--redact") == 2
        assert f"expected one run as html with --redact, got {got}" in capsys.readouterr().err
