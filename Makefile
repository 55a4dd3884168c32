# Everything a newcomer runs. `make demo` and `make test` need nothing but Python 3.11 or 3.12.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, for example the address of PyTorch's CPU wheels (see README).
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet install $(PIP_ARGS) --constraint constraints.txt
INSTALLED := $(VENV)/.installed
OLDEST := build/lower-bounds
# What touches most of the libraries, without Ray's processes; the rest is the same code.
OLDEST_TESTS := -m "not ray and not slow" tests/platform tests/samples tests/embeddings tests/cli tests/models/generative tests/serve/rpc/test_messages.py tests/serve/rpc/test_rpc.py

.DEFAULT_GOAL := help

help: ## This list.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

env: $(INSTALLED) ## Make .venv with everything that the targets below need.

# torch first and alone: no other package may choose its build.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[cpu,hf,image,language,text,tune,recipes,dev,docs,torchrec]'
	$(PIP) --no-deps torchrec
	$(BIN)/rayrec doctor --compile >/dev/null
	touch $@

constraints: env ## Write the versions that .venv has to constraints.txt.
	{ sed '/^# Written by/q' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
	| sed 's/^\(torch==[0-9.]*\)+.*/\1/; /^#/d; /^torchrec==/d'; } > constraints.new
	mv constraints.new constraints.txt

wheel: env ## Build the wheel, in build/wheel.
	$(BIN)/python -m pip --quiet wheel --no-deps --no-build-isolation --wheel-dir build/wheel .

# torch and what the tests need are those of constraints.txt: only what users get with RayRec has a lower bound to test.
lower-bounds: ## Run tests with the oldest versions that setup.cfg allows, in build/lower-bounds.
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed -n '/^install_requires/,/^\[options.packages/ s/>=/==/p; /^hf =/,/^# What/ s/>=/==/p' setup.cfg > $(OLDEST)/lowest.txt
	sed -n 's/^ *tritonclient\[http\]>=/tritonclient==/p' setup.cfg >> $(OLDEST)/lowest.txt
	grep -E '^(torch|pytest|pytest-timeout|pytest-xdist|hypothesis|httpx)==' constraints.txt >> $(OLDEST)/lowest.txt
	$(OLDEST)/bin/python -m pip --quiet install $(PIP_ARGS) --requirement $(OLDEST)/lowest.txt
	$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS)

gpu: ## Run the tests and measurements that need a GPU; see benchmarks/gpu.py. DEVICE=cpu is a dry run.
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --device $(or $(DEVICE),cuda)

image: ## Build the container image for CPUs.
	$(or $(shell command -v podman),docker) build --file Containerfile --tag rayrec .

demo: env ## Train, evaluate and serve a recommender on MovieLens 100K.
	$(BIN)/python examples/demo.py

# Names of places for the addresses: data alone, whose requirements are not needed. Without it, they are made up.
recipe-addresses: env ## Addresses to labeled segments, beside a CRF. Each recipe takes 9 to 14 minutes.
	-$(PIP) --no-deps jionlp==1.5.31
	$(BIN)/python -m recipes addresses

recipe-routing: env ## Questions to tools as JSON, beside TF-IDF with logistic regression.
	$(BIN)/python -m recipes routing

recipe-tags: env ## Tags of items from titles and pictures, beside logistic regressions.
	$(BIN)/python -m recipes tags

recipe-nearline: env ## Instructions for a recommender by a language model, before users ask.
	$(BIN)/python -m recipes nearline

# Some tests talk to a real server of event stores, look at the page of the service in a browser, or let Prometheus'
# own program check its rules; without these packages they are skipped.
packages: ## Install Debian's redis-server, chromium and prometheus for the tests that use them; asks for root.
	@for package in redis-server chromium prometheus; do \
	command -v $$package >/dev/null \
	|| { test "$$(id -u)" = 0 || as_root=sudo; $$as_root apt-get update -qq && \
	     $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$package; } \
	|| echo "$$package is missing and cannot be installed here: the tests that need it are skipped"; done

# A file's tests stay together, since they share what its fixtures made; tests/conftest.py orders the files.
# Three processes on two cores: those that wait for Ray's processes leave a core to the others.
# What is compiled of the modules is kept, wherever the environment says to keep none: every process of xdist and every
# process that a test starts imports the same ones.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p no:schemathesis --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Where the shell forbids bytecode, every process would compile all sources, and each of pytest's all tests, again.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: env ## Run the tests that show the main paths, eight minutes on two quiet cores.
	$(PYTEST) -m 'not slow' --hypothesis-profile quick

test-all: env ## Run all tests, the slow ones too, in some half an hour.
	$(PYTEST)

chaos: env ## Kill 50 processes of training runs, and compare with runs left alone.
	$(BIN)/python -m benchmarks.chaos --kills 50

quality: env ## Measure a row of docs/benchmarks/quality.md again: SOURCES=FOLDER ROW=beauty/shuffled/sasrec [SEED=0].
	$(BIN)/python -m benchmarks.reproduction $(SOURCES) $(or $(ROW),--missing) --seed $(or $(SEED),0)

lint: env ## Check style, types, spelling and links.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python docs/check_links.py

docs: env ## Build the documentation site in build/docs; warnings are errors.
	$(BIN)/python docs/generate_reference
	$(BIN)/python docs/check_links.py
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs . build/docs
	@echo "build/docs/index.html"

format: env ## Mend style where that is possible.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment, caches and everything the demo made.
	rm -rf $(VENV) .cache runs/demo data/movielens-100k .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help env constraints wheel lower-bounds gpu image demo recipe-addresses recipe-routing recipe-tags recipe-nearline packages test test-all chaos quality lint docs format clean
