# Everything the project needs is installed here: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTHONS ?= 3.10 3.11 3.12 3.13
PYENV_ROOT ?= $(HOME)/.pyenv
DEMO_ASKS := --ask "The ferry leaves at" --ask "What does the harbour master say when the fog comes in?"

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-core test-pythons coverage lint bench clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## the virtual environment, with kvferry installed in place

# What a demo needs comes first, and alone: it is to be seen soon.
$(VENV)/.runs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
# NIXL without what it depends on: host memory needs no CUDA, and torch alone would be gigabytes.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.5.1
	@touch $@

$(VENV)/.ready: $(VENV)/.runs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# The engines' environment takes minutes to install: what needs none is shown first.
demo: $(VENV)/.runs ## requests between two processes with every byte compared, then text from two vLLM engines, compared with one alone
	$(BIN)/kvferry demo --requests 100
	@$(MAKE) --no-print-directory up UP_ARGS='--port 0 --first-port 0 $(DEMO_ASKS)'

lint: setup ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

test-core: setup browser
	$(BIN)/python -m pytest tests --ignore=tests/vllm -n $(WORKERS) $(CORE_PYTEST_ARGS)

test-pythons: $(PYTHONS:%=test-python-%) ## the core's tests on every release of Python that is here, each in an environment of its own

# On the PATH or among pyenv's. What is on the PATH may be a shim that starts nothing.
test-python-%:
	@python=; for found in python$* $(PYENV_ROOT)/versions/$*.*/bin/python; do \
	  if "$$found" -c '' 2>/dev/null; then python=$$found; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "Python $*: skipped, it is not here"; exit 0; fi; \
	echo "Python $*: $$python"; \
	$(MAKE) --no-print-directory test-core VENV=.venv-$* PYTHON="$$python"

# Apart from the tests: counting lines takes longer than they do, and its table hides what failed.
coverage: CORE_PYTEST_ARGS = --cov --cov-report=term
coverage: test-core ## which lines the tests that need no engine reach

test: lint test-core test-vllm ## all checks: lint, types, tests, certification against vLLM

bench: setup ## preparing, moving and binding against named baselines, as ratios
	$(BIN)/python -m lab bench handshake
	$(BIN)/python -m lab bench transfer
	$(BIN)/python -m lab bench bind
	$(BIN)/python benchmarks/plan_and_bind.py

clean: ## remove what was built
	rm -rf $(VENV) .venv-* dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*

include browser.mk
include vllm.mk
include dist.mk
