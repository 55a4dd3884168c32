# Everything a newcomer runs. `make demo` and `make test` need nothing but Python 3.11 or 3.12.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, for example the address of PyTorch's CPU wheels (see README).
PIP_ARGS ?=

BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^ *\(torch==[0-9.]*\).*/\1/p' setup.cfg | head -n 1)
TORCHREC := $(shell sed -n 's/.*\(torchrec==[0-9.]*[0-9]\).*/\1/p' setup.cfg | head -n 1)
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help

help: ## This list.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

env: $(INSTALLED) ## Make .venv with everything that the targets below need.

# torch first and alone: no other package may choose its build.
$(INSTALLED): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $(TORCH)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[cpu,hf,text,dev,torchrec]'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps $(TORCHREC)
	touch $@

demo: env ## Train, evaluate and serve a recommender on MovieLens 100K.
	$(BIN)/python examples/demo.py

# Tests talk to a real server of event stores, and look at the page of the service in a browser; without them, these
# tests are skipped. Prometheus brings the program that checks its rules.
packages: ## Install Debian's redis-server, chromium and prometheus for the tests, where that is allowed.
	@for package in redis-server chromium prometheus; do \
	command -v $$package >/dev/null \
	|| { command -v apt-get >/dev/null && { test "$$(id -u)" = 0 || sudo -n true 2>/dev/null; } \
	&& { test "$$(id -u)" = 0 || as_root=sudo; $$as_root apt-get update -qq; \
	     DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -y -qq --no-install-recommends $$package; } \
	     >/dev/null 2>&1; } \
	|| echo "$$package is missing and cannot be installed here: the tests that need it are skipped"; done

# tests/conftest.py says which tests stay together in one process, and in which order.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

test: env packages ## Run the tests that show the main paths, in some eight minutes on two cores.
	$(PYTEST) -m 'not slow'

test-all: env packages ## Run all tests, the slow ones too, in some half an hour.
	$(PYTEST)

chaos: env ## Kill 50 processes of training runs, and compare with runs left alone.
	$(BIN)/python -m benchmarks.chaos --kills 50

quality: env ## Measure a row of benchmarks/QUALITY.md again: SOURCES=FOLDER ROW=beauty/shuffled/sasrec [SEED=0].
	$(BIN)/python -m benchmarks.reproduction $(SOURCES) $(or $(ROW),--missing) --seed $(or $(SEED),0)

lint: env ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## Mend style where that is possible.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment, caches and everything the demo made.
	rm -rf $(VENV) .cache runs/demo data/movielens-100k .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help env demo packages test test-all chaos quality lint format clean
