# Two commands for a newcomer: `make train` and `make test`. Everything sets itself up in .venv.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_ARGS ?=

.PHONY: train test matrix lint docs bench benchcheck clean help
help:
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

# The compiled parts are part of the install: a changed source means a new one.
NATIVE := $(wildcard src/torsh_distributed/comm/backends/shm/native/* src/torsh_distributed/compress/native/* src/torsh_distributed/parallel/native/*)

$(READY): pyproject.toml constraints.txt hatch_build.py $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "torsh-distributed needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

train: $(READY) ## set up and train a small GPT on two local workers
	$(BIN)/torsh train --demo gpt --nproc-per-node 2

test: $(READY) ## set up and run every test this machine can run
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

matrix: $(READY) ## the long form of the tables of combinations, which `make test` has in short
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix $(PYTEST_ARGS)

lint: $(READY) ## ruff, mypy --strict, layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY) ## build the site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY) ## run every benchmark case; results go to benchmarks/results
	$(BIN)/python -m benchmarks

benchcheck: $(READY) ## try every benchmark case for some seconds; keeps nothing
	$(BIN)/python -m benchmarks --quick

clean: ## remove the environment and everything generated
	rm -rf $(VENV) site dist build runs .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
