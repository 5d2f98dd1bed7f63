"""The page in a real Chromium: what a reader sees, with a mouse, a keyboard, a phone, paper, and without JavaScript."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.report.made_run import MadeRun

from leaktight.report.html import render_comparison, render_redacted, write_report
from leaktight.report.judgements import ANSWERS
from leaktight.report.runs import load_run
from leaktight.report.words import SYMBOLS, VERDICTS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing; pip install '.[dev]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is missing; apt-get install --no-install-recommends chromium"
)

Opener = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox does not start as root, nor in most containers
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if as_root else [])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(both_tracks: Path) -> Path:
    return write_report(both_tracks)


@pytest.fixture
def visit(browser: Any, report: Path) -> Iterator[Opener]:
    """Open the report; whatever it logs, throws or asks the network for fails the test."""
    contexts, faults = [], []

    def check_request(request: Any) -> None:
        if not request.url.startswith(("data:", "file:")):
            faults.append(f"asked for {request.url}")

    def opened(path: Path = report, *, width: int = 1280, script: bool = True, **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, java_script_enabled=script, reduced_motion="reduce", **options
        )
        context.set_default_timeout(60_000)  # a busy machine is no fault of the page
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", check_request)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


CONTRAST = """() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return numbers.length > 3 ? numbers : [...numbers.slice(0, 3), 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faults = [];
  let checked = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !element.getClientRects().length) continue;
    if (element.closest("script, style, title, desc")) continue;
    const style = getComputedStyle(element);
    const below = ground(element);
    const front = over(parse(element.closest("svg") ? style.fill : style.color), below);
    const [a, b] = [light(front), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    checked += 1;
    if (ratio < 4.5) faults.push(`${node.data.trim().slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return [checked, [...new Set(faults)]];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(visit: Opener, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    checked, faults = page.evaluate(CONTRAST)
    assert checked > 300
    assert faults == []
    page.locator(".pair-open").first.click()
    assert page.evaluate(CONTRAST)[1] == []


def test_light_and_dark_follow_the_system_until_the_reader_chooses(visit: Opener) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = visit(color_scheme="dark")
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    page.get_by_role("button", name="Dark colours").click()
    assert page.evaluate(ground) == dark
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_of_a_verdict_has_a_badge_of_its_own(visit: Opener, scheme: str) -> None:
    """Its own symbol and words, so that it does not depend on colour; text and edge stand out from the ground."""
    page = visit(color_scheme=scheme)
    page.get_by_text("What the words mean").click()
    badges = page.locator(".meanings .badge")
    assert badges.count() == len(VERDICTS)
    words = [" ".join(text.split()) for text in badges.all_inner_texts()]
    assert words == [f"{SYMBOLS[word]} {text}" for word, text in VERDICTS.items()]
    assert len({text.split()[0] for text in words}) == len(VERDICTS)
    colours = badges.evaluate_all("(all) => all.map((e) => getComputedStyle(e).color)")
    assert len(set(colours)) == len(VERDICTS)
    assert page.evaluate(CONTRAST)[1] == []


def test_the_first_screen_holds_the_five_answers(visit: Opener) -> None:
    page = visit(width=1280)
    rows = page.locator(".answer > div")
    assert rows.locator("dt").all_inner_texts() == list(ANSWERS.values())
    boxes = [rows.nth(index).bounding_box() for index in range(rows.count())]
    assert max(box["y"] + box["height"] for box in boxes) < 800
    above = page.evaluate(
        """() => {
          const top = document.querySelector(".answer").getBoundingClientRect().top;
          return [...document.querySelectorAll("main *, nav *, .tally *, .sub")]
            .filter((e) => e.getClientRects().length && e.getBoundingClientRect().top < top)
            .map((e) => e.outerHTML.slice(0, 80));
        }"""
    )
    assert above == []
    assert page.locator(".tally").last.bounding_box()["y"] < 800


def test_a_phone_reads_the_five_answers_one_below_the_other(visit: Opener) -> None:
    page = visit(width=390)
    rows = page.locator(".answer > div")
    boxes = [rows.nth(index).bounding_box() for index in range(rows.count())]
    assert len({box["x"] for box in boxes}) == 1
    assert all(after["y"] >= before["y"] + before["height"] for before, after in pairwise(boxes))
    assert all(box["width"] > 330 for box in boxes)
    sizes = rows.locator("dd").evaluate_all("(all) => all.map((e) => parseFloat(getComputedStyle(e).fontSize))")
    assert min(sizes) >= 16
    assert boxes[2]["y"] < 800


def test_the_keyboard_opens_what_each_attacker_did(visit: Opener) -> None:
    page = visit()
    summary = page.locator(".foes summary").first
    reason = page.locator(".foes details > p").first
    assert not reason.is_visible()
    page.locator(".card .pair-open").first.focus()
    page.keyboard.press("Tab")
    assert summary.evaluate("(e) => e === document.activeElement")
    assert summary.evaluate("(e) => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert reason.is_visible()
    page.keyboard.press("Space")
    assert not reason.is_visible()
    reached = page.locator(".foes summary, .meanings summary").evaluate_all("(all) => all.map((e) => e.tabIndex)")
    assert set(reached) == {0}


@pytest.mark.parametrize("width", [390, 1280])
def test_a_redacted_page_holds_to_the_same_rules(visit: Opener, both_tracks: Path, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report-redacted.html"
    path.write_text(render_redacted(load_run(both_tracks)))
    page = visit(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST)[1] == []
    assert page.locator("img").count() == 0
    bars = page.locator(".card .view .track")
    assert bars.count() > 10
    assert bars.first.bounding_box()["width"] > 100


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1280])
def test_the_page_never_scrolls_sideways(visit: Opener, width: int) -> None:
    page = visit(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")]
            .filter((e) => !e.closest(".scroll, .matrix-box, pre, .hidden, svg, thead") && e.getClientRects().length)
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []


def test_a_phone_shows_the_matrix_as_cards_with_the_attack_in_words(visit: Opener) -> None:
    page = visit(width=360)
    cell = page.locator(".matrix td").first
    assert "csdlg" in cell.inner_text()
    assert cell.bounding_box()["width"] > 250
    assert page.locator(".narrow-only svg").is_visible()
    assert not page.locator(".wide-only svg").is_visible()


@pytest.fixture(scope="module")
def wide_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with eight columns of attacks and three negative controls."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "audit-004")
    for defense in ("none", "outpost"):
        for attack in ("csdlg", "inverting_gradients", "dlg", "idlg", "gradinversion"):
            made.add(defense, attack, 0, 0.1)
        for attack in ("csdlg", "inverting_gradients", "dlg") if defense == "outpost" else ():
            made.add(defense, attack, 0, 0.1, adaptive=True)
        for control in ("prior_only", "mean_image", "public_image"):
            made.add(defense, control, 0, 0.9, role="control")
    return write_report(made.finish())


@pytest.mark.parametrize("wide", [False, True])
def test_the_controls_of_the_matrix_are_in_view_without_scrolling(
    visit: Opener, report: Path, wide_report: Path, *, wide: bool
) -> None:
    """Positive ones are the first row, negative ones a column that stays while attacks scroll."""
    page = visit(wide_report if wide else report, width=1280)
    box = page.locator("#matrix .matrix-box").bounding_box()
    controls = page.locator("#matrix .matrix .control")
    assert controls.count() == page.locator("#matrix .matrix tr").count()
    for index in range(controls.count()):
        own = controls.nth(index).bounding_box()
        assert own["x"] >= box["x"]
        assert own["x"] + own["width"] <= box["x"] + box["width"] + 1 <= 1280
    cells = page.locator("#matrix .matrix td.control")
    names = {"prior_only", "mean_image", "public_image"} if wide else {"prior_only"}
    assert all(name in cells.nth(0).inner_text() for name in names)
    row = page.locator("#matrix .matrix tbody tr").first
    assert "positive control" in row.inner_text()
    hidden = page.evaluate(
        """() => [...document.querySelectorAll("#matrix td.control *, #matrix tbody th")].filter((e) => {
          const box = e.getBoundingClientRect();
          if (!e.getClientRects().length || !e.textContent.trim()) return false;
          e.scrollIntoView({block: "center"});
          const now = e.getBoundingClientRect();
          const top = document.elementFromPoint(now.left + 2, now.top + now.height / 2);
          return !(top === e || e.contains(top) || top.contains(e));
        }).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert hidden == []


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_runs_over_the_edge_of_a_card(visit: Opener, width: int) -> None:
    page = visit(width=width)
    over = page.evaluate(
        """() => [...document.querySelectorAll(".card")].flatMap((card) => {
          const style = getComputedStyle(card);
          const edge = card.getBoundingClientRect().right - parseFloat(style.paddingRight) + 1;
          const walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT), found = [];
          for (let node = walker.nextNode(); node; node = walker.nextNode()) {
            const range = document.createRange();
            range.selectNodeContents(node);
            if (range.getBoundingClientRect().right > edge) found.push(node.data);
          }
          return found;
        })"""
    )
    assert over == []


def test_a_phone_shows_the_controls_of_the_matrix_in_each_card(visit: Opener, wide_report: Path) -> None:
    page = visit(wide_report, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for cell in page.locator("#matrix .matrix td.control").all():
        box = cell.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert "negative control" in cell.inner_text()
        assert "public_image" in cell.inner_text()


def test_everything_has_a_name(visit: Opener) -> None:
    page = visit()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("a, button, summary, [tabindex], img, table, section, nav, article")]
            .filter((e) => e.id !== "main" && !(
              e.getAttribute("aria-label") || e.getAttribute("alt")
              || (e.getAttribute("aria-labelledby") && document.getElementById(e.getAttribute("aria-labelledby")))
              || (e.tagName === "TABLE" && e.caption)
              || (["A", "BUTTON", "SUMMARY", "ARTICLE"].includes(e.tagName) && e.textContent.trim())))
            .map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
    assert page.locator("html[lang=en]").count() == 1
    for landmark in ("main", "banner", "contentinfo", "navigation"):
        assert page.get_by_role(landmark).count() == 1
    assert page.get_by_role("row").count() > 10
    assert page.get_by_role("rowheader", name="gaussian_noise").count() > 0


def test_controls_are_large_enough_to_hit(visit: Opener) -> None:
    page = visit(width=360)
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, nav a, summary, .pair-open, a.point .hit")]
            .filter((e) => e.getClientRects().length).map((e) => [e.outerHTML.slice(0, 60), e.getBoundingClientRect()])
            .filter(([, box]) => box.width < 24 || box.height < 24).map(([text]) => text)"""
    )
    assert small == []


def test_the_keyboard_reaches_the_report_first(visit: Opener) -> None:
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "What the words mean"
    page.keyboard.press("Tab")
    assert "pair-open" in page.evaluate("document.activeElement.className")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_pair_opens_large_by_keyboard_and_gives_the_focus_back(visit: Opener) -> None:
    page = visit()
    links, viewer = page.locator(".pair-open"), page.locator("#viewer")
    links.nth(1).focus()
    page.keyboard.press("Enter")
    assert viewer.is_visible()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    pictures = viewer.locator("img")
    assert pictures.count() == 4  # the original, the attack and both controls
    assert pictures.first.bounding_box()["width"] > 2 * links.nth(1).locator("img").first.bounding_box()["width"]
    shown = [page.locator("figure.pair").nth(index).get_attribute("data-title") for index in range(3)]
    assert viewer.locator("h2").inner_text() == shown[1]
    assert "PSNR" in viewer.inner_text()
    page.keyboard.press("ArrowRight")
    assert viewer.locator("h2").inner_text() == shown[2]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert viewer.locator("h2").inner_text() == shown[0]
    page.keyboard.press("Escape")
    assert not viewer.is_visible()
    assert page.evaluate("document.activeElement === document.querySelectorAll('.pair-open')[0]")


def test_points_of_a_figure_explain_themselves(visit: Opener) -> None:
    page = visit()
    tip, point = page.locator("#tip"), page.locator(".wide-only a[href='#tradeoff-1']")
    assert not tip.is_visible()
    point.focus()
    assert "no defense: SSIM" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.locator(".panels .point").first.hover()
    assert "csdlg on no defense, round 0: PSNR" in tip.inner_text()
    point.click()
    assert page.evaluate("location.hash") == "#tradeoff-1"


def test_links_from_the_matrix_open_what_is_closed(visit: Opener) -> None:
    page = visit()
    gallery = page.locator("details.gallery").first
    gallery.locator("summary").click()
    assert not page.locator("#images-1").is_visible()
    page.locator(".matrix a").first.click()
    page.locator("#images-1").wait_for(state="visible")


def test_without_javascript_everything_can_still_be_read(visit: Opener) -> None:
    page = visit(script=False)
    assert page.get_by_role("button").count() == 0
    figure = page.locator("#images figure.pair").first
    before = figure.locator("img").first.bounding_box()["width"]
    figure.locator(".pair-open").click()
    assert figure.locator("img").first.bounding_box()["width"] > 1.8 * before
    figure.get_by_role("link", name="Make smaller").click()
    assert figure.locator("img").first.bounding_box()["width"] == before
    page.get_by_text("The same as a table").click()
    assert page.get_by_role("region", name="Table: leakage by round").is_visible()
    assert "on the front" in page.locator(".wide-only svg a.point title").first.text_content()


def test_paper_is_light_and_shows_what_is_closed_on_screen(visit: Opener, tmp_path: Path) -> None:
    page = visit(color_scheme="dark")
    page.evaluate(
        """addEventListener("beforeprint", () => {
            window.stillClosed = document.querySelectorAll("details:not([open])").length;
        })"""
    )
    page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    content = (tmp_path / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", content)) > 2
    assert page.evaluate("window.stillClosed") == 0
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(26, 29, 33)"
    assert not page.get_by_role("navigation").is_visible()


@pytest.mark.parametrize("width", [360, 1280])
def test_a_comparison_holds_to_the_same_rules(
    visit: Opener, finished_run: Path, other_run: Path, tmp_path: Path, width: int
) -> None:
    write_report(finished_run)
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison([load_run(finished_run), load_run(other_run)], tmp_path))
    page = visit(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST)[1] == []
    page.get_by_role("link", name="audit-001").click()
    assert page.locator("h1").inner_text().startswith("An undefended update")
