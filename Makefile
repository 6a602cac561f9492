# Two commands matter: `make demo` and `make test`. Each makes .venv and installs what it needs, once.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint configs/constraints.txt
DEFINITION := pyproject.toml configs/constraints.txt
# Stamps: installed after the last change of the definition. What the tests need includes what a run needs.
RUN := $(VENV)/.installed-run
TEST := $(VENV)/.installed-test
NOTEBOOKS := $(VENV)/.installed-notebooks

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench notebooks clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  PYTHON=python3.12 chooses the interpreter for $(VENV); ARGS="..." is passed on to demo, test and bench.'

setup: $(TEST) ## Make .venv with everything that the other targets need

demo: $(RUN) ## Train a small GPT-NeoX with ZeRO-3 on two CPU processes, and let it write
	$(BIN)/neox-lit fit --config configs/quickstart.yaml $(ARGS)

test: lint ## Lint, then run all tests (ARGS="-k harness" for some)
	$(BIN)/python -m pytest $(ARGS)

lint: $(TEST) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST) ## Rewrite files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(RUN) ## Compare step time and memory with DDP and FSDP2 (about six minutes)
	$(BIN)/python benchmarks/step_time.py $(ARGS)

notebooks: $(NOTEBOOKS) ## Run every notebook from top to bottom, outputs included
	@for notebook in $(wildcard notebooks/*.ipynb); do \
		echo "$$notebook"; $(BIN)/jupyter execute --inplace "$$notebook" || exit 1; \
	done

clean: ## Remove caches, builds and runs; .venv stays
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
		"Python 3.10 or newer is needed, $(PYTHON) is %d.%d. Choose another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(RUN): $(DEFINITION) | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(TEST): $(DEFINITION) | $(BIN)/python
	$(INSTALL) --editable '.[test,lint]'
	@touch $(RUN) $@

$(NOTEBOOKS): $(DEFINITION) | $(BIN)/python
	$(INSTALL) --editable '.[notebooks]'
	@touch $(RUN) $@
