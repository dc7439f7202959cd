# Everything a newcomer needs: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
SOURCES := src tests benchmarks

.PHONY: demo test test-all bench lint format docs setup setup-dev clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) -U "pip>=25.1"

$(VENV)/.capibara: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.capibara-dev: $(VENV)/.capibara
	$(PIP) -c constraints.txt -e '.[train,docs]' --group dev
	@touch $@

setup: $(VENV)/.capibara
setup-dev: $(VENV)/.capibara-dev

demo: setup  ## train about two minutes on CPython's documentation text, then write a sample
	$(BIN)/capibara train --config demo
	$(BIN)/capibara generate --config demo --prompt "The with statement" --length 400

test: setup-dev  ## the tests that finish in minutes
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: setup-dev  ## every test
	$(BIN)/python -m pytest -n 2

bench: setup-dev  ## measured ratios against named peers, written to bench-results/
	$(BIN)/python -m benchmarks

lint: setup-dev  ## format, lint, types, import order, stubs
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: setup-dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site .pytest_cache .ruff_cache
