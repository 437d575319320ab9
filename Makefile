# Every target creates and updates its virtual environment by itself; `make` alone lists the targets.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
# Arguments for pytest, for instance: make test PYTEST_ARGS="-k units"
PYTEST_ARGS ?= -n 2 --dist worksteal
# make test SLOW=1 runs the slow cases, too.
SLOW ?=

BIN := $(VENV)/bin
# The versions that fit the Python: JAX 0.11 and newer need Python 3.12.
CONSTRAINTS ?= $(shell $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -c \
	'import sys; print("constraints/oldest.txt" if sys.version_info < (3, 12) else "constraints/newest.txt")')
# Without --no-compile pip would compile every module of every package; Python compiles those it imports anyway, and
# keeps them: a process that may not starts JAX in three seconds instead of one, and tests start hundreds of them.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help finetune test pytest quick lint format docs peers compare ray versions bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

finetune: $(VENV)/.installed-run ## Tune the embedded model with LoRA; ARGS="--steps 200" goes to `lowtide finetune`.
	$(BIN)/lowtide finetune $(ARGS)

test: lint pytest ## Lint, check types and room imports, and run the tests; SLOW=1 with the slow ones.

# Without LLVM's optimisations (and what tests/conftest.py leaves out with them) CPU programs compile in less time.
UNOPTIMIZED := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"
# With the slow ones, some of what computes numbers of its own and the examples of docstrings run as users compile them.
AS_USERS := tests/core/test_grad.py tests/core/test_accumulate.py tests/losses tests/adapters/test_lora.py \
	tests/models/test_llama.py tests/test_project.py
MARKED := not peers and not gpu
# No tests (5) is no failure: PYTEST_ARGS="-k units" may choose some of one of the two runs alone.
OR_NONE := || [ $$? -eq 5 ]

pytest: $(VENV)/.installed-dev ## Run the tests alone.
ifdef SLOW
	$(BIN)/python -m pytest -m "$(MARKED)" $(PYTEST_ARGS) $(AS_USERS) $(OR_NONE)
	$(UNOPTIMIZED) $(BIN)/python -m pytest -m "$(MARKED)" $(PYTEST_ARGS) $(addprefix --ignore=,$(AS_USERS)) $(OR_NONE)
else
	$(UNOPTIMIZED) $(BIN)/python -m pytest -m "$(MARKED) and not slow" $(PYTEST_ARGS) $(OR_NONE)
endif

# The dearest, which `make test` runs: pytest --durations=30 says which.
DEAR := tests/integration tests/testing tests/ext tests/offload/test_layerwise.py tests/offload/test_contract.py \
	tests/pipeline/test_executor.py tests/pipeline/test_blocks.py tests/pipeline/test_split.py \
	tests/train/test_pipelined.py tests/train/test_failures.py tests/train/test_out_of_memory.py \
	tests/train/test_live_bytes.py tests/train/test_frozen_bytes.py tests/train/test_guard.py \
	tests/train/test_offload.py tests/train/test_alone.py tests/distributed tests/cli/test_finetune.py \
	tests/cli/test_fits.py tests/cli/test_explain.py tests/memory/test_isolate.py tests/memory/test_owners.py \
	tests/memory/test_remedies.py tests/adapters/test_lora_products.py tests/models/test_llama.py \
	tests/models/test_llama_programs.py tests/offload/test_optax.py tests/offload/test_optimizer.py tests/offload/test_scan.py \
	tests/train/test_weights.py tests/train/test_interrupts.py

quick: $(VENV)/.installed-dev ## Three minutes of the tests: none for absent chips, none of the dearest.
	$(UNOPTIMIZED) $(BIN)/python -m pytest -m "$(MARKED) and not tpu_aot and not gpu_aot and not slow" \
		$(PYTEST_ARGS) $(addprefix --ignore=,$(DEAR)) $(OR_NONE)

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

# Ray by itself: its clusters find each other on a machine, and its patience does not grow with what runs beside it.
RAY := tests/integration/test_ray.py

peers: compare ray ## Compare with torch, transformers and PEFT; train on Ray.

compare: $(VENV)/.installed-peers
	$(UNOPTIMIZED) $(BIN)/python -m pytest -m peers $(PYTEST_ARGS) --ignore $(RAY)

ray: $(VENV)/.installed-peers
	$(BIN)/python -m pytest -m peers $(RAY)

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
