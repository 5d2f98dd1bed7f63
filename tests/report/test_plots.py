from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from tests.results.made import made_summary

from leaktight.report.charts import legend, panels, pareto_plot
from leaktight.report.plots import Box, place_label, ticks
from leaktight.report.words import tradeoff_names
from leaktight.results.schema import Leak, Moment, Score, Tradeoff, TradeoffRow

FINITE = st.floats(-1e6, 1e6, allow_nan=False)


@given(FINITE, FINITE, st.integers(2, 8))
def test_ticks_cover_their_range_in_equal_steps(one: float, other: float, about: int) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, about)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 2 * about + 3
    steps = [after - before for before, after in pairwise(found)]
    assert max(steps) - min(steps) < 1e-6 * max(1.0, abs(found[0]), abs(found[-1]))


def test_a_label_goes_where_nothing_is() -> None:
    area = Box(0, 0, 400, 300)
    taken = [Box(215, 140, 200, 20)]
    box = place_label("outpost", 200, 150, 6, taken, area)
    assert all(box.overlap(other) == 0 for other in taken)
    assert box.overlap(area) == box.width * box.height
    assert place_label("outpost", 395, 150, 6, [], area).left < 395


def row(defense: str, leak: float | None, accuracy: float | None, **more: object) -> TradeoffRow:
    return TradeoffRow.model_validate(
        {"defense": defense, "leak": {"metric": "ssim", "worst": leak}, "accuracy": accuracy, **more}
    )


def test_points_lie_where_their_figures_are() -> None:
    rows = (
        row("none", 0.9, 0.9, on_front=True),
        row("a", 0.1, 0.8, on_front=True),
        row("b", 0.5, 0.7),
        row("c", None, 0.9),
    )
    drawn = pareto_plot(made_summary(tradeoff=Tradeoff(rows=rows)), anchor="p", width=700, height=400)
    assert drawn is not None
    root = ElementTree.fromstring(drawn)
    links = {link.attrib["href"]: link for link in root.iter("a")}
    assert set(links) == {"#tradeoff-1", "#tradeoff-2", "#tradeoff-3"}
    spots = {}
    for name, link in links.items():
        mark = next(part for part in link.iter("circle") if part.attrib["class"] == "mark")
        spots[name] = float(mark.attrib["cx"]), float(mark.attrib["cy"])
    assert spots["#tradeoff-2"][0] < spots["#tradeoff-3"][0] < spots["#tradeoff-1"][0]
    assert spots["#tradeoff-1"][1] < spots["#tradeoff-2"][1] < spots["#tradeoff-3"][1]
    assert "no defense: SSIM 0.90, accuracy 90.0 %" in links["#tradeoff-1"].attrib["aria-label"]
    front = next(path for path in root.iter("path") if path.attrib.get("class") == "front")
    assert len(front.attrib["d"].split("L")) == 2


def test_less_leakage_is_left_also_where_low_values_leak() -> None:
    rows = (
        TradeoffRow(defense="leaky", leak=Leak(metric="mse", worst=0.001), accuracy=0.9),
        TradeoffRow(defense="tight", leak=Leak(metric="mse", worst=0.2), accuracy=0.8),
    )
    drawn = pareto_plot(made_summary(tradeoff=Tradeoff(rows=rows)), anchor="p", width=700, height=400)
    assert drawn is not None
    marks = [part for part in ElementTree.fromstring(drawn).iter("circle") if part.attrib["class"] == "mark"]
    assert float(marks[1].attrib["cx"]) < float(marks[0].attrib["cx"])


def test_names_have_their_settings() -> None:
    rows = [
        row("none", 0.1, 0.9),
        row("noise(noise_std=0.1)", 0.1, 0.9, settings={"noise_std": 0.1, "at": "step"}),
        row("noise(noise_std=0.2)", 0.2, 0.9, settings={"noise_std": 0.2, "at": "update"}),
    ]
    assert tradeoff_names(rows) == ["no defense", "noise (noise_std 0.1)", "noise (noise_std 0.2, at update)"]


def test_text_in_a_figure_is_escaped() -> None:
    rows = (row("<script>alert(1)</script>", 0.9, 0.9), row('"&', 0.5, 0.7))
    drawn = pareto_plot(made_summary(tradeoff=Tradeoff(rows=rows)), anchor="p", width=700, height=400)
    assert drawn is not None
    assert "<script" not in drawn
    assert "&lt;script&gt;" in drawn


def test_without_figures_there_is_no_plot() -> None:
    assert (
        pareto_plot(made_summary(tradeoff=Tradeoff(rows=(row("a", None, 0.5),))), anchor="p", width=700, height=400)
        is None
    )
    assert panels(made_summary()) == []
    assert legend(made_summary()) == []


def moment(defense: str, step: int, accuracy: float | None = None) -> Moment:
    return Moment(defense=defense, attack="csdlg", adaptive=False, round=step, accuracy=accuracy, trials=3)


def test_panels_show_what_was_measured_in_every_round() -> None:
    moments = [
        moment(defense, step).with_scores({"psnr": Score(mean=level - step)})
        for defense, level in (("none", 30.0), ("outpost", 12.0))
        for step in (0, 5, 10)
    ]
    drawn = panels(made_summary(over_time=moments))
    assert len(drawn) == 1
    root = ElementTree.fromstring(drawn[0])
    assert [title.text for title in root.findall("title")] == ["PSNR by round"]
    tips = [part.attrib["data-tip"] for part in root.iter("g") if "data-tip" in part.attrib]
    assert len(tips) == len(moments)
    assert "csdlg on no defense, round 5: PSNR 25.0 dB" in tips
    assert [series.name for series in legend(made_summary(over_time=moments))] == [
        "csdlg on no defense",
        "csdlg on outpost",
    ]


def test_a_single_round_is_drawn_too() -> None:
    assert len(panels(made_summary(over_time=[moment("none", 3, accuracy=0.5)]))) == 1
