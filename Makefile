# Every target sets up what it needs: a virtual environment in .venv, made once and again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Which benchmark `make bench` runs: core, solver, runtime.
SCRIPT ?= core

.PHONY: help setup demo test lint format bench clean

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(STAMP)  ## the virtual environment, with OptPipe and the development tools in it

$(STAMP): pyproject.toml
	@echo 'Setting up $(VENV): this takes some minutes the first time'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("OptPipe needs Python 3.11 or later: make PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m solver.warm_up
	@touch $@

demo: $(STAMP)  ## measure a GPT, solve for a schedule within a budget that 1F1B exceeds, train under it
	$(BIN)/python benchmarks/demo.py

test: $(STAMP)  ## the tests, two at a time
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## ruff's formatter and its safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the benchmark tables; ARGS go to the script that SCRIPT names
	$(BIN)/python benchmarks/$(SCRIPT).py $(ARGS)

clean:  ## remove what the targets made, the virtual environment too
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
