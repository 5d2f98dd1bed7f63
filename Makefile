# Everything runs in a virtual environment inside this folder; nothing global is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help setup audit test test-slow bench clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "expected Python 3.11 or newer on the PATH; set PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: .venv/.ready   ## prepare .venv

audit: setup     ## run the main job on the embedded data
	$(BIN)/leaktight audit

test: setup      ## lint, types, dependency rules, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not slow" -n 2

test-slow: setup ## the long tests too
	$(BIN)/pytest -m slow

bench: setup     ## timings, as ratios within one run
	$(BIN)/python -m bench

clean:           ## remove the environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build
