"""`leaktight audit --fail-on` and `leaktight verify` as a pipeline uses them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from tests.audits.scenes import SMALL
from tests.here import Here

SEEDED = f'secret_seed = "{"ab" * 32}"\n{SMALL}'
WEAK, STRONG = (SEEDED.replace('kind = "noise"', f'kind = "noise"\nnoise_std = {std}') for std in (1e-9, 10.0))
"""A defense in name only, and one that leaves nothing to be found."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    (tmp_path / "weak.toml").write_text(WEAK)
    (tmp_path / "strong.toml").write_text(STRONG)
    return Here(tmp_path, monkeypatch, capsys)


def audit(here: Here, *arguments: str) -> tuple[int, str, str]:
    return here("audit", *arguments, "--workers", "0", "--no-adaptive", "--out", "run")


def test_a_leak_behind_a_defense_is_exit_code_3_after_everything_is_written(here: Here, tmp_path: Path) -> None:
    code, out, err = audit(here, "weak.toml", "--fail-on", "identified", "--json")
    assert code == 3
    assert err.splitlines()[-1] == (
        "leaktight: --fail-on identified: noise (noise_std 1e-09) (diagnostic): reconstructed by csdlg; see run"
    )
    summary = json.loads(out)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    suite = Xml.parse(tmp_path / "run" / "junit.xml").getroot()[0]
    assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == ("leaktight diagnostic", "1", "1")
    (sarif,) = json.loads((tmp_path / "run" / "sarif.json").read_text())["runs"]
    assert sarif["properties"]["digest"] == summary["digest"]
    assert (tmp_path / "run" / "report.html").exists()
    code, out, _ = here("verify", "run")
    assert (code, out.split()[1]) == (0, str(sum(cell["trials"] for cell in summary["cells"])))
    again, _, _ = audit(here, "weak.toml", "--fail-on", "reconstructed", "--resume")
    assert again == 3, "a finished run can be decided again"
    assert here("verify", "run")[0] == 0


def test_a_run_that_cannot_conclude_neither_passes_nor_fails(here: Here, tmp_path: Path) -> None:
    code, _, err = audit(here, "strong.toml", "--fail-on", "reconstructed")
    assert code == 1
    assert (
        "--fail-on reconstructed can be neither passed nor failed: noise (noise_std 10) (diagnostic): cannot conclude"
        in err
    )
    assert Xml.parse(tmp_path / "run" / "junit.xml").getroot().get("errors") == "1"
    assert audit(here, "strong.toml", "--resume")[0] == 0, "without the gate it is a result like others"
    next((tmp_path / "run" / "images").iterdir()).write_bytes(b"another")
    assert here("verify", "run")[0] == 1
    code, _, err = here("report", "run")
    assert code == 0
    assert err.startswith("warning: run was changed after it was written: picture ")
    lines = (tmp_path / "run" / "trials.jsonl").read_text()
    (tmp_path / "run" / "trials.jsonl").write_text(lines.replace('"status": "done"', '"status": "failed"', 1))
    code, _, err = here("report", "run")
    assert code == 2, "a trial that is not as it was written is not shown"
    assert "trials.jsonl, line 1: its checksum is another" in err


@pytest.mark.parametrize("command", ["audit", "tradeoff"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--fail-on", "labels", "--fail-on", "identified"), "expected one --fail-on"),
        (("--fail-on", "identified", "--dry-run"), "expected --fail-on or --dry-run, got both"),
        (("--fail-on", "nothing-found"), "this verdict is no leak"),
        (("--fail-on", "labels"), "expected an attack that reads labels from the update"),
    ],
)
def test_a_gate_that_makes_no_sense_is_bad_usage_before_any_work(
    command: str, options: tuple[str, ...], told: str, here: Here, tmp_path: Path
) -> None:
    code, out, err = here(command, "strong.toml", "--workers", "0", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert not (tmp_path / "runs").exists()
