"""Writes the JSON schema of each document: `python -m leaktight.results FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from leaktight.core.files import write_atomically
from leaktight.results.card import Card
from leaktight.results.forecast import Forecast
from leaktight.results.schema import Record, Summary, TrainingSummary, Trial

DOCUMENTS: Mapping[str, type[Record]] = {
    "trial": Trial,
    "summary": Summary,
    "training": TrainingSummary,
    "card": Card,
    "forecast": Forecast,
}
"""trial: a line of `trials.jsonl`. summary: of an audit, a trade-off, an inspection.

training: of a training run. card: of the leaderboard. forecast: of a dry run.
"""


def schemas() -> dict[str, str]:
    """The JSON schema (draft 2020-12) of each document, by file name."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {
        f"{name}.json": json.dumps(head | kind.model_json_schema(), indent=1) + "\n" for name, kind in DOCUMENTS.items()
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m leaktight.results FOLDER")
    for file, text in schemas().items():
        write_atomically(Path(sys.argv[1]) / file, text)
