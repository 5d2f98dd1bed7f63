"""`report.html`: one self-contained file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from leaktight import __version__
from leaktight.core.files import write_atomically
from leaktight.report import judgements, words
from leaktight.report.charts import legend, panels, pareto_plot
from leaktight.report.comparison import compare
from leaktight.report.page import build_page
from leaktight.report.redact import Scrub, finalizer, redacted
from leaktight.report.runs import Run, load_run
from leaktight.results.schema import Track


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run's folder from its result files, and return its path."""
    path = run_dir / "report.html"
    write_atomically(path, render_report(load_run(run_dir)))
    return path


def render_report(run: Run) -> str:
    """The page of one run."""
    return _render(run, title=f"Leakage report: {run.name}")


def render_redacted(run: Run) -> str:
    """The page of one run without pictures, names of clients, paths and error texts."""
    bare, scrub = redacted(run)
    return _render(bare, title="Redacted leakage report", scrub=scrub)


def _render(run: Run, *, title: str, scrub: Scrub | None = None) -> str:
    tradeoff = run.summary.tradeoff
    return fill(
        "report.html.j2",
        scrub=scrub,
        title=title,
        redacted=scrub is not None,
        page=build_page(run),
        run=run,
        summary=run.summary,
        meanings=judgements.MEANINGS,
        pareto_wide=pareto_plot(run.summary, anchor="pareto-wide", width=760, height=440),
        pareto_narrow=pareto_plot(run.summary, anchor="pareto-narrow", width=340, height=380),
        tradeoff_names=words.tradeoff_names(tradeoff.rows) if tradeoff else [],
        time_panels=panels(run.summary),
        time_legend=legend(run.summary),
    )


def render_comparison(runs: Sequence[Run], folder: Path) -> str:
    """The page of several runs, for a file in `folder`, with links to their reports where these exist."""
    comparison = compare(runs)
    links = [_link(run.path / "report.html", folder) for run in runs]
    return fill(
        "comparison.html.j2",
        title="Leakage of " + ", ".join(comparison.names),
        comparison=comparison,
        links=list(zip(comparison.names, links, strict=True)),
    )


def _link(report: Path, folder: Path) -> str | None:
    if not report.is_file():
        return None
    return quote(Path(os.path.relpath(report.resolve(), folder.resolve())).as_posix())


def fill(template: str, *, scrub: Scrub | None = None, **values: object) -> str:
    """Fill a template of this package; values that are not `Markup` are escaped. scrub: applied to every text."""
    style, script = _asset("style.css"), _asset("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = _environment() if scrub is None else _environment().overlay(finalize=finalizer(scrub))
    return environment.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        policy=Markup(
            f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        version=__version__,
        **values,
    )


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("leaktight.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=words.number,
        percent=words.percent,
        seconds=words.seconds,
        threat=words.threat_words,
        fact=words.fact,
        fact_name=words.fact_name,
        defense=_defense,
        leaked=judgements.leaked_words,
        share=judgements.leaked_share,
        valid=judgements.valid_trials,
        faults=judgements.fault_words,
        victims=judgements.victims_words,
        claim=judgements.claim_words,
        chance=judgements.chance_words,
        chosen=judgements.chosen_words,
        metric=words.metric_words,
        symbol=lambda level: words.SYMBOLS.get(level, "·"),
    )
    environment.globals.update(
        attack_words=words.attack_words,
        counted=words.counted,
        defense_words=words.defense_words,
        identification_words=judgements.identification_words,
        interval=words.interval,
        label_words=judgements.label_words,
        percent=words.percent,
        span=words.span,
        accuracy_note=judgements.accuracy_note,
        recommended_words=judgements.recommended_words,
        verdict_words=judgements.verdict_words,
    )
    return environment


@jinja2.pass_context
def _defense(context: jinja2.runtime.Context, name: str, track: Track = "diagnostic") -> str:
    """A defense of the run that a template shows, with its settings."""
    return words.defense_name(context["summary"], name, track)


def _asset(name: str) -> str:
    return files("leaktight.report").joinpath("templates", name).read_text(encoding="utf-8")
