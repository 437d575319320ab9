# Every target creates and updates its virtual environment by itself; `make` alone lists the targets.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
# Arguments for pytest, for instance: make test PYTEST_ARGS="-k units"
PYTEST_ARGS ?= -n 2
# make test SLOW=1 runs the slow cases, too.
SLOW ?=

BIN := $(VENV)/bin
# The versions that fit the Python: JAX 0.11 and newer need Python 3.12.
CONSTRAINTS ?= $(shell $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -c \
	'import sys; print("constraints/oldest.txt" if sys.version_info < (3, 12) else "constraints/newest.txt")')
# Without --no-compile pip would compile every module of every package; Python compiles those it imports anyway.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help finetune test pytest lint format docs peers versions bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

finetune: $(VENV)/.installed-run ## Tune the embedded model with LoRA; ARGS="--steps 200" goes to `lowtide finetune`.
	$(BIN)/lowtide finetune $(ARGS)

test: lint pytest ## Lint, check types and room imports, and run the tests; SLOW=1 with the slow ones.

# Without LLVM's optimisations, which change neither XLA's programs nor their bytes, the quick tests take a third less.
pytest: $(VENV)/.installed-dev ## Run the tests alone.
	$(if $(SLOW),,XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0") $(BIN)/python -m pytest -m "not peers and not gpu$(if $(SLOW),, and not slow)" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## Ruff, pyright and import-linter.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Let ruff rewrite what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## Build the documentation into site/; every warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

peers: $(VENV)/.installed-peers ## Compare with torch, transformers and PEFT.
	$(BIN)/python -m pytest -m peers $(PYTEST_ARGS)

versions: $(VENV)/.installed-dev ## Run the tests with every Python that is here, oldest and newest JAX (nox).
	$(BIN)/nox

bench: $(VENV)/.installed-dev ## Run the benchmarks that need no accelerator.
	$(BIN)/python benchmarks/frozen_gradients.py

clean: ## Remove build and test leftovers, but not the virtual environment.
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Lowtide needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp a purpose, so that `make finetune` installs no development tools and a second call installs nothing.
$(VENV)/.installed-run: pyproject.toml constraints/oldest.txt constraints/newest.txt | $(BIN)/python
	@echo "Installing Lowtide into $(VENV) ..."
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints/oldest.txt constraints/newest.txt | $(BIN)/python
	@echo "Installing Lowtide with its $* tools into $(VENV) ..."
	$(INSTALL) --editable ".[$(EXTRAS_$*)]"
	@touch $@

EXTRAS_dev := dev
EXTRAS_docs := docs
EXTRAS_peers := dev,peers
