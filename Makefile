# Two commands for a newcomer: `make train` and `make test`. Everything sets itself up in .venv.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
READY := $(VENV)/.ready
PYTEST_ARGS ?=
# "dev,services" adds the servers and trackers that a few tests talk to; without them these are skipped.
EXTRAS ?= dev
# Exact versions, by the last of the extras.
comma := ,
CONSTRAINTS := constraints/$(lastword $(subst $(comma), ,$(EXTRAS))).txt

.PHONY: train test unit matrix coverage mutants lint docs bench benchcheck counts versions wheel constraints clean help
help:
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

# Packages are installed uncompiled (below), so Python has to keep what it compiles: without that every worker compiles
# all of torch again when it starts.
unexport PYTHONDONTWRITEBYTECODE

# What an install is made from. The compiled parts are part of it: a changed source means a new one.
NATIVE := $(wildcard src/torsh_distributed/*/native/* src/torsh_distributed/comm/backends/shm/native/*)
INSTALLED := pyproject.toml constraints/runtime.txt constraints/accounting.txt $(CONSTRAINTS) hatch_build.py $(NATIVE)
# Modules are compiled when they are first imported, not all of torch's at install: 20 s less.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "torsh-distributed needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(INSTALLED) | $(BIN)/python
	@echo "setting up $(VENV) to train (a minute the first time)"
	@$(INSTALL) -c constraints/runtime.txt -e '.[plot]'
	@touch $(RUNTIME)

$(READY): $(INSTALLED) | $(BIN)/python
	@echo "setting up $(VENV) with the tools of development (a minute or two the first time)"
	@$(INSTALL) -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@if [ $(lastword $(subst $(comma), ,$(EXTRAS))) = services ]; then $(INSTALL) --no-deps -r constraints/accounting.txt; fi
	@touch $(RUNTIME) $(READY)

train: $(RUNTIME) ## set up and train a small GPT on two local workers
	$(BIN)/torsh demo gpt --nproc-per-node 2

test: $(READY) ## set up and run every test this machine can run
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

unit: $(READY) ## the quick tests that start no ranks, jobs, servers or interpreters, with fewer examples of each property: about 75 seconds
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not ranks and not slow and not matrix' $(PYTEST_ARGS)

matrix: $(READY) ## the long form of the tables of combinations, and what takes a server or a browser for long
	$(BIN)/python -m pytest -n 2 --dist worksteal -m matrix $(PYTEST_ARGS)

coverage: $(READY) ## the lines and branches of each package that its tests reach, against tests/coverage.json; FOLDERS="compress plan" measures some
	$(BIN)/python tools/coverage_by_folder.py $(COVERAGE_ARGS) $(FOLDERS)

mutants: $(READY) ## small changes of FILES="src/…" that their quick tests do not notice; MUTANTS_ARGS="--count 50 --seed 1"
	$(BIN)/python tools/mutants.py $(MUTANTS_ARGS) $(FILES)

lint: $(READY) ## ruff, mypy --strict, layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY) ## build the site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY) ## run every benchmark case; results go to benchmarks/results
	$(BIN)/python -m benchmarks

benchcheck: $(READY) ## try every benchmark case, or CASES, for some seconds; keeps nothing
	$(BIN)/python -m benchmarks --quick $(CASES)

counts: $(READY) ## hold what a training step does, counted, against what is kept; `python -m benchmarks counts` keeps new ones
	$(BIN)/python -m benchmarks --against benchmarks/results/counts.json

versions: $(BIN)/python ## the quick tests with another Python and torch: PY=3.11 TORCH=2.11, or TURN=a commit's hash
	$(BIN)/python tools/versions.py $(if $(TURN),--turn $(TURN),--python $(or $(PY),3.11) --torch $(or $(TORCH),2.11)) $(PYTEST_ARGS)

wheel: $(BIN)/python ## build the sdist and wheels for aarch64 and x86_64 into dist/, and try them in empty environments
	$(BIN)/python tools/wheels.py $(WHEEL_ARGS)

constraints: $(READY) ## write the newest versions that fit into constraints/
	$(BIN)/python tools/constraints.py $(CONSTRAINTS_ARGS)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) site dist build runs .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
