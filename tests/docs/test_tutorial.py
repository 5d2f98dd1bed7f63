"""docs/tutorial.md, in a few seconds: its files and commands without the attacks, and how outputs are compared.

The whole session is `tests/slow/test_tutorial_session.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.docs.pages import blocks, run_blocks
from tests.docs.session import COLUMNS, PAGE, shown, words

FOUND = blocks(PAGE)


def test_files_and_commands_of_the_page_fit_together(tmp_path: Path) -> None:
    own = next(place for place, block in enumerate(FOUND) if block.file)  # before it is the quick start of the README
    run_blocks(FOUND[own:], tmp_path, ["--dry-run"])
    assert len(list((tmp_path / "images").glob("*/*.png"))) == 1797
    assert (tmp_path / "after.pt").is_file()


def test_every_command_is_followed_by_what_it_prints() -> None:
    for block, after in pairwise(FOUND):
        assert not block.calls or after.language == "text", f"no output after: {block.text}"
        assert after.language != "text" or block.calls, f"output of no command: {after.text}"
    lines = [line for block in FOUND if block.language == "text" for line in block.text.splitlines()]
    assert max(map(len, lines)) <= COLUMNS


def test_outputs_are_compared_by_their_words() -> None:
    page = "time: 3 min 22 s\nauto   97.2 [2.4,99.9]  −0.07 < 0.1 %\nloss 3.89 × 10⁻¹⁵, 2.6e-11\nabout 1.9 minutes"
    here = "time: 25 s\nauto  5 [2,9] 0.07 1 % loss 0.1, 7\nabout 2 hours"
    assert words(page) == words(here)
    cost = "Time of a client's round: {}. Accuracy was not measured"
    assert words(cost.format("about the same with noise")) == words(cost.format("x 0.7 with noise"))
    assert words("● reconstructed  no defense") != words("? cannot conclude  no defense")
    assert words("1 of 1 victim") != words("1 of 1 client")


def test_progress_is_left_out_and_parts_are_chosen() -> None:
    output = "plan\n1 of 3: none.csdlg psnr 9\ntraining, no defense: round 1 of 2, accuracy 9 %\n\nb  \nb\n\nc\n\nd"
    assert shown(output) == "plan\n\nb\nb\n\nc\n\nd\n"
    assert shown(output, "1 4") == "plan\n\n...\n\nd\n"
    assert shown(output, "2-3") == "...\n\nb\nb\n\nc\n\n...\n"
    assert shown(" ".join(["word"] * 20)).splitlines() == [" ".join(["word"] * 16), " ".join(["word"] * 4)]
