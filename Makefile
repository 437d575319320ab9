# Every target creates and updates the virtual environment that it needs; `make` without a target lists the targets.
VENV ?= .venv
PYTHON ?= python3
ARGS ?=
# Arguments for pytest, for instance: make pytest PYTEST_ARGS="-k units"
PYTEST_ARGS ?=
SHELL := bash

BIN := $(VENV)/bin
# Versions that fit the installed Python: JAX 0.11 and newer need Python 3.12.
CONSTRAINTS ?= $(shell $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -c \
	'import sys; print("constraints/oldest.txt" if sys.version_info < (3, 12) else "constraints/newest.txt")')
# Without --no-compile, pip compiles every module of every package. Python compiles the modules that it imports anyway,
# and caches them. Without that cache a process starts JAX in three seconds instead of one, and tests start hundreds of
# processes.
unexport PYTHONDONTWRITEBYTECODE
# On a terminal pip shows its progress. Elsewhere, such as in the log of a workflow, it prints only warnings and errors.
# GNU make 4.1 and newer set MAKE_TERMOUT on a terminal; with an older make pip stays quiet.
PIP_OUTPUT := $(if $(MAKE_TERMOUT),--progress-bar on,--quiet)
INSTALL := $(BIN)/python -m pip install $(PIP_OUTPUT) --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help finetune test test-all pytest pytest-all selected lint format docs peers wheel dist versions bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

finetune: $(VENV)/.installed-run ## Tune the embedded model with LoRA; ARGS="--steps 200" goes to `lowtide finetune`.
	$(BIN)/lowtide finetune $(ARGS)

test: lint pytest ## Lint, check types and layers, and run the fast tests. Aim: ten minutes.

# Tests that run on any machine; the others need other libraries, a GPU, or half an hour.
LOCAL := not peers and not gpu and not rehearsal
# A sentinel is a slow test that represents others of its kind.
FAST := $(LOCAL) and (sentinel or not slow)
# `make test-all` runs these numeric tests, and the docstring examples, with the compiler options that users have.
OPTIMIZED := tests/core/test_grad.py tests/core/test_accumulate.py tests/losses tests/adapters/test_lora.py \
	tests/models/test_llama.py tests/test_project.py
LOGS := build/logs
PYTEST := $(BIN)/python -m pytest --dist worksteal --durations=10 --color=no
# Options of the caller's shell could leave tests out.
unexport PYTEST_ADDOPTS

# Two lanes run at the same time: tests that compute, and tests that mostly wait for processes that they start.
# pytest's status 5 means that no test ran. xdist also ends with 5 when its workers die during import, so it is a
# failure. Only with PYTEST_ARGS one of the lanes may be empty, because "-k units" may select tests of the other alone.
# `make pytest` without PYTEST_ARGS collects, in the second lane, only the files that contain its tests. Each of its
# workers would spend eight seconds on collecting all files, and needs two for these.
# $(1): marker expression, $(2): more arguments, $(3): name of the logs, $(4): files of the second lane
PROCESS_FILES = $(shell grep --recursive --files-with-matches --word-regexp --include='test_*.py' processes tests)
PROCESS_WORKERS := 3
define lanes
	@mkdir -p $(LOGS); \
	$(PYTEST) -n $(PROCESS_WORKERS) -m "($(1)) and processes" $(2) $(PYTEST_ARGS) $(if $(strip $(PYTEST_ARGS)),,$(4)) \
		>$(LOGS)/$(3)-processes.log 2>&1 & \
	lane=$$!; trap 'kill $$lane 2>/dev/null' EXIT; set -o pipefail; first=0; second=0; \
	$(PYTEST) -n 2 -m "($(1)) and not processes" $(2) $(PYTEST_ARGS) 2>&1 | tee $(LOGS)/$(3).log || first=$$?; \
	wait $$lane || second=$$?; echo "==> tests that start processes"; cat $(LOGS)/$(3)-processes.log; \
	case "$$first $$second$(if $(strip $(PYTEST_ARGS)), with arguments)" in \
		"0 0"|"0 0 with arguments"|"0 5 with arguments"|"5 0 with arguments") ;; \
		"5 5 with arguments") echo "error: no test of this tier matches PYTEST_ARGS" >&2; exit 1 ;; \
		*) echo "error: pytest ended with $$first and, for tests that start processes, with $$second (5: no test ran)" >&2; exit 1 ;; \
	esac
endef

pytest: PROCESS_WORKERS := 2
pytest: $(VENV)/.installed-dev ## Run the fast tests alone.
	$(call lanes,$(FAST),,fast,$(PROCESS_FILES))

SELECTION ?= build/selection.txt

# The tests that .ci/run adds to `make test`; scripts/ci.py documents the selection.
selected: $(VENV)/.installed-dev
	@mkdir -p $(dir $(SELECTION))
	$(BIN)/python scripts/ci.py select --output $(SELECTION)
	$(call lanes,$(LOCAL),@$(SELECTION),selected)
	$(BIN)/python scripts/ci.py ran $(SELECTION) $(LOGS)/selected.log $(LOGS)/selected-processes.log

# Pages are run but not rewritten. `make peers` writes recordings only for new or changed questions, and then the tree is
# no longer that of the commit. So .ci/verified names exactly the commit that passed.
test-all: $(VENV)/.installed-peers $(VENV)/.installed-docs ## Run everything, peers, Ray and all pages included; writes .ci/verified when it passes.
	@[ -z '$(PYTEST_ARGS)' ] || { echo "test-all runs all tests: leave PYTEST_ARGS out" >&2; exit 1; }
	rm -rf $(LOGS)
	$(BIN)/python scripts/ci.py begin $(LOGS)/commit
	$(MAKE) lint
	$(MAKE) docs CACHED=1
	$(MAKE) peers
	$(BIN)/python scripts/ci.py begin $(LOGS)/commit-after-peers
	$(BIN)/python scripts/docs_outputs.py --all --dry-run
	$(MAKE) pytest-all
	$(BIN)/python scripts/ci.py verified $(LOGS)/commit $(LOGS)/*.log

pytest-all: export TPU_AS_USERS = 1
pytest-all: export LOWTIDE_KILLS = 40
pytest-all: $(VENV)/.installed-dev
	@mkdir -p $(LOGS)
	set -o pipefail; COMPILE_AS_USERS=1 $(PYTEST) -n 2 -m "$(LOCAL)" --hypothesis-profile=slow $(OPTIMIZED) \
		2>&1 | tee $(LOGS)/optimized.log
	$(call lanes,not peers and not gpu,--hypothesis-profile=slow $(addprefix --ignore=,$(OPTIMIZED)),all)

lint: $(VENV)/.installed-dev ## Ruff, pyright, import-linter, and the limits of scripts/house.py.
	@status=0; $(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || { echo "hint: make format"; status=1; }; \
	$(BIN)/python scripts/house.py || status=1; exit $$status
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Let ruff rewrite what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages contain the outputs of their code. `make docs` runs stale pages, with ALL=1 every page, with CACHED=1 none.
docs: $(VENV)/.installed-docs ## Run stale pages, build site/; ALL=1 runs all pages, CACHED=1 none.
	$(BIN)/python scripts/docs_outputs.py $(if $(CACHED),--check,$(if $(ALL),--all))
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Ray runs alone: its clusters find each other on a machine, and its timeouts do not allow for a busy machine.
RAY := tests/integration/test_ray.py

peers: $(VENV)/.installed-peers ## Ask torch, transformers and PEFT anew and compare with the recordings; train on Ray.
	@mkdir -p $(LOGS)
	set -o pipefail; $(PYTEST) -n 2 -m "recorded or peers" --peers=live $(PYTEST_ARGS) --ignore $(RAY) 2>&1 | tee $(LOGS)/peers.log
	set -o pipefail; $(BIN)/python -m pytest --color=no -m peers $(RAY) 2>&1 | tee $(LOGS)/ray.log

# A fresh environment runs the wheel outside of the clone. It has the packages of VENV, but not the clone: Python reads
# no .pth files of a folder that another .pth file names.
wheel: $(VENV)/.installed-dev ## Build wheel and sdist, and run the wheel outside of the clone with the packages of VENV.
	rm -rf dist
	$(BIN)/python -m hatchling build
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; set -e; \
	wheel=$$(realpath dist/*.whl); packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -m venv --without-pip "$$folder/venv"; \
	$(BIN)/python -m pip --python "$$folder/venv/bin/python" install --quiet --disable-pip-version-check --no-deps "$$wheel"; \
	$(BIN)/python -c "$$packages" >"$$("$$folder/venv/bin/python" -c "$$packages")/packages.pth"; \
	cd "$$folder"; export JAX_PLATFORMS=cpu; \
	venv/bin/python -c 'import lowtide, sys; sys.exit(not lowtide.__file__.startswith(sys.prefix))'; \
	$(EXPLAIN_STEP); $(FINETUNE_BRIEFLY)

# The core needs no extra: `explain` runs before `finetune` is installed.
dist: wheel ## Build and run the wheel, and run it in a fresh environment with the packages that it asks for.
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; set -e; \
	wheel=$$(realpath dist/*.whl); \
	$(PYTHON) -m venv "$$folder/venv"; cd "$$folder"; export JAX_PLATFORMS=cpu; \
	install="venv/bin/python -m pip install $(PIP_OUTPUT) --disable-pip-version-check --constraint $(abspath $(CONSTRAINTS))"; \
	echo "Installing the wheel with JAX into a fresh environment. This can take minutes."; \
	$$install "$$wheel"; $(EXPLAIN_STEP); \
	echo "Installing the packages of lowtide finetune there. This can take minutes."; \
	$$install "$$wheel[finetune]"; $(FINETUNE_BRIEFLY)

EXPLAIN_STEP := echo 'def job(): import jax.numpy as np; return (lambda w, x: x @ w), (np.ones((64, 64)), np.ones((8, 64)))' \
	>step.py; venv/bin/lowtide explain step.py:job
FINETUNE_BRIEFLY := venv/bin/lowtide finetune --steps 10 --out run

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

# One stamp file per purpose: `make finetune` installs no development tools, and a second call installs nothing.
$(VENV)/.installed-%: pyproject.toml constraints/oldest.txt constraints/newest.txt | $(BIN)/python
	@echo "Installing Lowtide into $(VENV) with $(PACKAGES_$*). This can take minutes."
	$(INSTALL) --editable ".[$(EXTRAS_$*)]"
	@touch $@

EXTRAS_run := finetune
EXTRAS_dev := dev
EXTRAS_docs := docs
EXTRAS_peers := dev,peers
PACKAGES_run := JAX and the packages of lowtide finetune
PACKAGES_dev := JAX, the test tools, and compilers for TPUs and GPUs that are not attached
PACKAGES_docs := MkDocs and the packages that the pages use
PACKAGES_peers := the test tools, PyTorch, Transformers, PEFT, bitsandbytes and Ray
