"""The commands inside this process: bad input, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audits.scenes import SMALL
from tests.here import Here

from leaktight.config.names import ENTRIES


@pytest.fixture
def here(here: Here, tmp_path: Path) -> Here:
    (tmp_path / "small.toml").write_text(SMALL)
    return here


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "csdgl"], "did you mean 'csdlg'?"),
        (["--defense", "outposts"], "did you mean 'outpost'?"),
        (["--set", "audit.trial=1"], "did you mean 'trials'?"),
        (["--set", "audit.local=3"], "expected a table [audit.local]"),
        (["--set", "audit.attack_round=9"], "rounds count from 0"),
        (["--workers", "many"], "expected workers"),
        (["--trials", "few"], "audit.trials: expected an integer or 'auto', got 'few'"),
        (["--trials", "0"], "expected trials >= 1, got 0"),
        (["--confidence", "0"], "expected confidence > 0, got 0"),
        (["--confidence", "1.5"], "expected confidence > 0 and < 1, got 1.5"),
        (["--trials", "auto", "--confidence", "1e-6"], "expected at most 10000 victims, got 2995731; lower trials, or"),
        (["--trials", "100000000"], "expected at most 10000 victims, got 100000000"),
        (["--set", 'threat.knows=["lables"]'], "threat.knows: expected a list of '"),
        (["--budget", "nan"], "or minutes > 0, got nan"),
        (["--budget", "0"], "or minutes > 0, got 0"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_two(
    here: Here, tmp_path: Path, arguments: list[str], message: str
) -> None:
    for command in ("audit", "tradeoff"):
        code, out, errors = here(command, "small.toml", *arguments)
        assert (code, out) == (2, "")
        assert message in errors
        assert len(errors.strip().splitlines()) == 1, errors
    assert not (tmp_path / "runs").exists(), "nothing half-written"


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(here: Here, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, errors = here("audit", "small.toml", "--out", "file/run")
    assert (code, out) == (1, "")
    assert "cannot write to file/run" in errors.splitlines()[-1]


def test_a_dry_run_says_what_would_run_and_writes_nothing(here: Here, tmp_path: Path) -> None:
    code, out, errors = here("audit", "small.toml", "--dry-run", "--trials", "7", "--defense", "clipping")
    assert (code, out) == (0, "")
    assert (
        "35 trials in total: csdlg (attack), mean_image (control) on no defense, "
        "clipping (clip_norm 4); csdlg with knowledge of the defense" in errors
    )
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_how_many_trials_there_are_at_least_and_at_most(here: Here) -> None:
    code, out, errors = here("audit", "small.toml", "--dry-run", "--trials", "auto", "--confidence", "0.05")
    assert (code, out) == (0, "")
    assert "victims: 5, and 59 where they do not decide" in errors
    assert (
        "25 to 295 trials: csdlg (attack), mean_image (control) on no defense, noise (noise_std 0.1); csdlg with"
        in errors
    )


def test_a_folder_that_holds_a_run_is_not_overwritten(here: Here, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("seed = 1\n")
    assert "add --resume" in here("audit", "small.toml", "--out", "run")[2]
    assert "other settings" in here("audit", "small.toml", "--out", "run", "--resume")[2]


def test_help_names_everything_that_can_be_listed(here: Here) -> None:
    code, out, _ = here("list", "--help")
    assert code == 0
    assert "leaktight list threats" in out
    for kind in ENTRIES:
        assert kind in out
