"""All recipes can be read; a recipe that names what is not there is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaktight.config import recipes
from leaktight.config.settings import load_config
from leaktight.core.errors import ConfigError, UsageError
from leaktight.reproductions import file
from leaktight.reproductions import recipe as module
from leaktight.reproductions.recipe import Place, read_recipe, reproducible
from leaktight.reproductions.run import Reproduced, parse_shard

SMALL = """
[recipe]
paper = "lrp"
where = "Table 9"
title = "test"
least = 2
[recipe.rows]
"none" = {defense = "none"}
[recipe.columns]
"SSIM" = {attack = "csdlg", metric = "ssim"}
[recipe.scales.smoke]
minutes = 0.1
[[recipe.claims]]
says = "it leaks"
row = "none"
column = "SSIM"
than = [0.5]
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def write(text: str, published: str = "") -> str:
        (tmp_path / "mine.toml").write_text(text)
        if published:
            (tmp_path / "mine.csv").write_text(published)
        for place in (recipes, module, file):
            monkeypatch.setattr(place, "recipes", lambda: {"mine": tmp_path / "mine.toml"})
        return "mine"

    return write


@pytest.mark.parametrize("name", reproducible())
def test_a_recipe_is_complete(name: str) -> None:
    """Every recipe can be read, has a smoke scale, claims, and either published numbers or a reason why not."""
    recipe = read_recipe(name)
    assert {"smoke", "cpu"} <= recipe.scales.keys()
    assert recipe.scales["cpu"].minutes <= 60
    assert recipe.claims
    assert recipe.published or "no numbers" in recipe.notes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('row = "none"', 'row = "nothing"', "claim 'it leaks': no row 'nothing'; choose from: none"),
        ('column = "SSIM"', 'column = "PSNR"', "no column 'PSNR'"),
        ("than = [0.5]", "", "expected something to compare with"),
        ('title = "test"', 'title = "test"\nclam = 1', "clam: Extra inputs are not permitted"),
        ('metric = "ssim"', 'part = "other"', "no part 'other'"),
        ("minutes = 0.1", "", "scales.smoke.minutes: Field required"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(written, old: str, new: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        read_recipe(written(SMALL.replace(old, new)))
    assert message in str(error.value)


def test_published_numbers_are_read_from_the_file(written) -> None:  # type: ignore[no-untyped-def]
    recipe = read_recipe(written(SMALL, "# Table 9\nrow,SSIM\nnone,0.52\n"))
    assert recipe.published == {"none": {"SSIM": "0.52"}}
    with pytest.raises(ConfigError, match="no row 'other'"):
        read_recipe(written(SMALL, "row,SSIM\nother,0.52\n"))


def test_a_column_may_have_a_part_for_each_row(written, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    parts = '[[recipe.parts]]\nname = "none, small"\nset = ["data.root={data}/x"]\n[recipe.rows]\n"other" = {}\n'
    text = SMALL.replace("[recipe.rows]\n", parts).replace('metric = "ssim"', 'metric = "ssim", part = "{row}, small"')
    made = Reproduced(read_recipe(written(text)), "smoke", tmp_path, data_root=tmp_path)
    assert [job.settings for job in made.jobs_at(Place(row="none", column="SSIM"))] == [(f"data.root={tmp_path}/x",)]
    assert made.jobs_at(Place(row="other", column="SSIM")) == []


def test_an_audit_has_no_defenses_but_its_own(written, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """An audit of a config without a defense would add some."""
    (job,) = Reproduced(read_recipe(written(SMALL)), "smoke", tmp_path).jobs
    assert [each.name for each in job.planned.experiment.defenses] == ["none"]  # type: ignore[union-attr]


def test_an_unknown_recipe_or_scale_is_a_clear_error(written, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    name = written(SMALL)
    with pytest.raises(UsageError, match="no recipe 'mene'; did you mean 'mine'"):
        read_recipe("mene")
    with pytest.raises(UsageError, match="mine has no scale cpu; it has smoke"):
        _ = Reproduced(read_recipe(name), "cpu", tmp_path).jobs


@pytest.mark.parametrize("text", ["3/2", "0/2", "2", "a/b", ""])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a shard such as 2/3"):
        parse_shard(text)


TWO_PARTS = SMALL.replace(
    "[recipe.rows]",
    '[[recipe.parts]]\nname = "a b"\n[[recipe.parts]]\nname = "b"\n'
    '[recipe.rows]\n"other" = {part = "a", defense = "none"}',
)


def test_a_row_and_a_column_choose_a_part_together(written) -> None:  # type: ignore[no-untyped-def]
    recipe = read_recipe(written(TWO_PARTS.replace('attack = "csdlg"', 'attack = "csdlg", part = "b"')))
    parts = {place.row: recipe.choice(place)["part"] for place in recipe.places()}
    assert parts == {"other": "a b", "none": "b"}


def test_the_part_of_a_column_follows_that_of_the_row(written) -> None:  # type: ignore[no-untyped-def]
    recipe = read_recipe(written(TWO_PARTS.replace('attack = "csdlg"', 'attack = "csdlg", part = "{row} b"')))
    parts = {place.row: recipe.choice(place)["part"] for place in recipe.places()}
    assert parts == {"other": "a b", "none": "none b"}


def test_a_share_of_an_unknown_row_is_refused(written) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="no row 'nothing'"):
        read_recipe(written(SMALL.replace('metric = "ssim"', 'metric = "ssim", percent_of = "nothing"')))


AXES = SMALL.replace(
    "[recipe.rows]",
    """[recipe.axes.data]
"A" = {set = ["data.kind=digits"], at.smoke = ["data.size=8"]}
"B" = {set = ["data.kind=photos"]}
[recipe.axes.batch]
"1" = {}
"4" = {set = ["local.batch_size=4"], at.smoke = ["local.samples=4"], seeds = 2}
[[recipe.parts]]
name = "A 4"
adaptive = false
set = ["seed=3"]
[[recipe.parts]]
name = "alone"
[recipe.rows]""",
).replace('metric = "ssim"', 'metric = "ssim", part = "A 1"')


def test_parts_are_products_of_axes(written) -> None:  # type: ignore[no-untyped-def]
    parts = {part.name: part for part in read_recipe(written(AXES)).parts}
    assert list(parts) == ["A 1", "A 4", "B 1", "B 4", "alone"]
    both = parts["A 4"]
    assert both.set == ("data.kind=digits", "local.batch_size=4", "seed=3")
    assert both.at == {"smoke": ("data.size=8", "local.samples=4")}
    assert (both.seeds, both.adaptive, parts["B 4"].adaptive, parts["B 1"].seeds) == (2, False, True, 1)


def test_all_own_parts_have_what_is_said_for_each(written) -> None:  # type: ignore[no-untyped-def]
    each = '[recipe.each]\nseeds = 3\nset = ["own.row={part}"]\nat.smoke = ["attack.{0..1}.iterations=3"]\n'
    parts = {
        part.name: part
        for part in read_recipe(written(AXES.replace("[recipe.axes.data]", f"{each}[recipe.axes.data]"))).parts
    }
    assert parts["A 1"].set == ("own.row=A 1", "data.kind=digits")
    assert parts["A 1"].at["smoke"] == ("attack.0.iterations=3", "attack.1.iterations=3", "data.size=8")
    assert (parts["alone"].set, parts["alone"].seeds, parts["B 4"].seeds) == (("own.row=alone",), 3, 2)


def test_a_scale_may_name_parts_by_a_pattern(written) -> None:  # type: ignore[no-untyped-def]
    def parts(*names: str) -> tuple[str, ...]:
        text = AXES.replace("minutes = 0.1", f"minutes = 0.1\nparts = {list(names)}")
        return read_recipe(written(text)).scales["smoke"].parts

    assert parts("alone", "A 1") == ("alone", "A 1")
    assert parts("alone", "* 4", "A *") == ("A 1", "A 4", "B 4", "alone")
    for wrong in ("C *", "C 1"):
        with pytest.raises(ConfigError, match="no part 'C"):
            parts("A *", wrong)


def test_rows_and_columns_may_be_names_of_parts(written) -> None:  # type: ignore[no-untyped-def]
    text = AXES.replace('[recipe.rows]\n"none" = {defense = "none"}\n', "").replace(', part = "A 1"', "")
    text = (
        text.replace("least = 2", 'least = 2\nrows = ["A", "alone"]').replace('"SSIM"', '"4"').replace('"none"', '"A"')
    )
    recipe = read_recipe(written(text))
    parts = {str(place): recipe.choice(place)["part"] for place in recipe.places()}
    assert parts == {"A, 4": "A 4", "alone, 4": "alone"}
    with pytest.raises(ConfigError, match="no part 'elone 4'"):
        read_recipe(written(text.replace('"A", "alone"', '"A", "elone"')))


LIKE = SMALL.replace("[recipe]", '[recipe]\nlike = "base"').replace('metric = "ssim"', 'metric = "ssim", part = "a"')


@pytest.fixture
def extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Write a recipe that is like another one, which has a config, two parts and settings of a scale."""
    parts = '[[recipe.parts]]\nname = "a"\nset = ["seed=1"]\n[[recipe.parts]]\nname = "b"\n[recipe.rows]'
    base = (
        LIKE.replace('like = "base"\n', "")
        .replace("[recipe.rows]", parts)
        .replace("minutes = 0.1", 'minutes = 0.1\nset = ["audit.trials=2"]')
    )

    def write(text: str) -> str:
        files = {name: tmp_path / f"{name}.toml" for name in ("base", "mine")}
        files["base"].write_text("seed = 7\n" + base)
        files["mine"].write_text(text)
        for place in (recipes, module, file):
            monkeypatch.setattr(place, "recipes", lambda: files)
        return "mine"

    return write


def test_a_recipe_has_what_the_one_has_that_it_is_like(extended) -> None:  # type: ignore[no-untyped-def]
    recipe = read_recipe(extended(LIKE))
    assert [(part.name, part.set) for part in recipe.parts] == [("a", ("seed=1",)), ("b", ())]
    assert recipe.scales["smoke"].set == ("audit.trials=2",)
    assert load_config(Path("recipe:mine")).seed == 7


def test_it_may_use_some_parts_under_other_names_and_have_own_ones(extended) -> None:  # type: ignore[no-untyped-def]
    own = LIKE.replace('part = "a"', 'part = "own"').replace(
        "[recipe.rows]", '[recipe.use]\n"x" = "a"\n[[recipe.parts]]\nname = "own"\n[recipe.rows]'
    )
    assert [part.name for part in read_recipe(extended(own)).parts] == ["x", "own"]
    listed = own.replace('[recipe.use]\n"x" = "a"\n', "").replace('like = "base"', 'like = "base"\nuse = ["*"]')
    assert [part.name for part in read_recipe(extended(listed)).parts] == ["a", "b", "own"]
    with pytest.raises(ConfigError, match="use: no part 'c'"):
        read_recipe(extended(own.replace('"x" = "a"', '"x" = "c"')))
    with pytest.raises(ConfigError, match="like: no recipe 'bas'; did you mean 'base'"):
        read_recipe(extended(LIKE.replace('"base"', '"bas"')))
