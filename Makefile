# Needs Python >= 3.10 (with venv and pip) and make. Everything is installed into .venv, and
# installed again only when pyproject.toml changes.

PYTHON      ?= python3
PYTHON310   ?= python3.10
VENV        ?= .venv
WORKERS     ?= 2
PYTEST_ARGS ?=
DEMO_ARGS   ?=

BIN    := $(VENV)/bin
OLDEST := .venv-oldest
PIP    := -m pip --disable-pip-version-check install --quiet
TRAIN  := $(VENV)/.installed-train
DEV    := $(VENV)/.installed-dev
DOCS   := $(VENV)/.installed-docs
OTHERS := $(VENV)/.installed-integrations
CODE   := $(wildcard src tests examples benchmarks experiments tools)

# The development install includes the training one.
ANY := $(if $(wildcard $(DEV)),$(DEV),$(TRAIN))

# One thread per worker, or the workers compete for cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help test test-slow test-oldest lint format docs wheel demo clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

# Triton's interpreter needs a process of its own. Exit status 5: no test was selected.
test: lint ## lint, check types and run the quick tests (PYTEST_ARGS="-k smooth", WORKERS=2)
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" || [ $$? -eq 5 ]

test-slow: $(OTHERS) ## run the slow tests, also with programs of others
	$(PYTEST) -m slow || [ $$? -eq 5 ]
	TRITON_INTERPRET=1 $(PYTEST) -m slow || [ $$? -eq 5 ]

test-oldest: BIN := $(OLDEST)/bin
test-oldest: $(OLDEST)/.installed ## run all tests on Python 3.10 and PyTorch 2.6 (PYTHON310=python3.10)
	$(PYTEST)

lint: $(DEV) ## ruff check, ruff format --check and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: $(DEV) ## fix and format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(DEV) $(DOCS) ## build the site into site/; a broken link is an error
	$(PYTEST) tests/test_site.py tools/site_pages.py tools/site_docstrings.py
	$(BIN)/mkdocs build --strict # not --quiet, which hides warnings from strict

wheel: $(DEV) ## build sdist and wheel, check both, try the wheel with PyTorch alone
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/check_wheel.py dist

demo: $(ANY) ## train four losses on ambiguous letters and write a report (DEMO_ARGS="--folder DIR")
	$(BIN)/topklass demo $(DEMO_ARGS)

clean: ## remove environments, caches and builds
	rm -rf $(VENV) $(OLDEST) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "topklass needs Python >= 3.10")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(TRAIN): pyproject.toml | $(BIN)/python
	@echo "Installing topklass into $(VENV) (the first time this downloads PyTorch) ..."
	$(BIN)/python $(PIP) -e ".[train]"
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "Installing topklass and its development tools into $(VENV) (the first time this downloads PyTorch) ..."
	$(BIN)/python $(PIP) -e ".[dev]"
	@touch $@

$(DOCS): pyproject.toml | $(BIN)/python
	@echo "Installing topklass and what builds its site into $(VENV) ..."
	$(BIN)/python $(PIP) -e ".[docs]"
	@touch $@

$(OTHERS): pyproject.toml | $(BIN)/python
	@echo "Installing topklass, its development tools and the programs of others into $(VENV) ..."
	$(BIN)/python $(PIP) -e ".[dev,integrations]"
	@touch $(DEV) $@

$(OLDEST)/.installed: pyproject.toml
	@echo "Installing topklass with PyTorch 2.6 into $(OLDEST) ..."
	[ -d $(OLDEST) ] || $(PYTHON310) -m venv $(OLDEST) || { rm -rf $(OLDEST); exit 1; }
	$(OLDEST)/bin/python $(PIP) -e ".[dev]" "torch==2.6.*" "torchvision==0.21.*"
	@touch $@
