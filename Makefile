# Needs Python >= 3.10 (with venv and pip) and make; everything else goes into .venv.
# The stamps inside .venv record what is installed, so that only a change of pyproject.toml
# installs again.

PYTHON      ?= python3
VENV        ?= .venv
WORKERS     ?= 2
PYTEST_ARGS ?=
DEMO_ARGS   ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TRAIN := $(VENV)/.installed-train
DEV   := $(VENV)/.installed-dev
CODE  := $(wildcard src tests examples benchmarks)

# The development install contains the other.
ANY := $(if $(wildcard $(DEV)),$(DEV),$(TRAIN))

.DEFAULT_GOAL := help
.PHONY: help test lint format demo clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

# The second run has the tests of kernels in Triton's interpreter; 5: none of them is selected.
test: export OMP_NUM_THREADS := 1
test: lint ## lint, check types and run all tests (PYTEST_ARGS="-k smooth", WORKERS=2)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS) || [ $$? -eq 5 ]

lint: $(DEV) ## ruff check, ruff format --check and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(DEV) ## let ruff fix and format the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

demo: $(ANY) ## three losses on confused letters, with a report (DEMO_ARGS="--folder DIR")
	$(BIN)/topklass demo $(DEMO_ARGS)

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "topklass needs Python >= 3.10")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(TRAIN): pyproject.toml | $(BIN)/python
	@echo "Installing topklass into $(VENV) (the first time this downloads PyTorch) ..."
	$(PIP) -e ".[train]"
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "Installing topklass and its test tools into $(VENV) (the first time this downloads PyTorch) ..."
	$(PIP) -e ".[dev]"
	@touch $@
