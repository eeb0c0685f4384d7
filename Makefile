# One command each; every target builds the virtual environment that it needs.
#
#   make demo    a whole fleet on this machine classifies 300 real images (light runtime, no torch)
#   make unit    the tests without services, for the inner loop
#   make test    the test suite
#   make wheel   the wheel, installed in an empty environment, runs the demo in a folder with names like ours
#   make docs    the documentation as a site, in the folder site/
#   make check   formatting, lint, types, import layers, and the types of the page
#
# PYTHON chooses the interpreter, EXTRA the ONNX Runtime build: `make demo EXTRA=gpu`.
# WORKERS is the number of processes that share the tests; `make test COVER=--cov` measures what they cover.

PYTHON ?= python3
EXTRA  ?= cpu
VENV   ?= .venv
TRAIN  ?= .venv-train
RAY    ?= .venv-ray
TSC    ?= .venv/tsc
PIP    := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
DEMO   ?=
BUILT  ?= $(CURDIR)/dist
# Tests that start services wait more than they compute: three workers keep two cores busy. The tests of a file stay in
# one worker, for they share its services, and so do those of tests/acceptance, which share a fleet; files are handed out
# in their order, those with many processes first.
WORKERS ?= 3
COVER   ?=
SHARED  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo unit test test-train test-ray test-peers check check-page docs wheel format clean

help:
	@sed -n '3,8p' Makefile | cut -c5-

# `pip install` is skipped as long as pyproject.toml has not changed since. Python compiles the modules that it imports;
# compiling all of torch would take a minute.
$(VENV)/.light: pyproject.toml
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRA)]'
	@touch $@

$(VENV)/.dev: pyproject.toml
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$(EXTRA),dev]'
	@touch $(VENV)/.light $@

$(TRAIN)/.ready: pyproject.toml
	@test -x $(TRAIN)/bin/python || $(PYTHON) -m venv $(TRAIN)
	$(TRAIN)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[cpu,dev,train,elastic]'
	@touch $@

$(RAY)/.ray: pyproject.toml
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[cpu,dev,learn,ray]'
	@touch $@

demo: $(VENV)/.light
	$(VENV)/bin/terrace demo $(DEMO)

# Where the environment forbids Python to keep what it has compiled, each process that a test starts compiles our modules
# again, and each worker all the tests.
demo wheel unit test test-train test-ray test-peers: export PYTHONDONTWRITEBYTECODE =

unit: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(SHARED) tests/unit

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(SHARED) $(COVER)

test-train: $(TRAIN)/.ready
	$(TRAIN)/bin/python -m pytest $(SHARED) -m 'train and not benchmark' \
	  $$(grep -rl --include='test_*.py' 'mark\.train' tests | sort)

test-ray: $(RAY)/.ray
	$(RAY)/bin/python -m pytest -m ray tests/integration/engines tests/integration/training

test-peers: $(VENV)/.dev $(TRAIN)/.ready
	$(VENV)/bin/python -m pytest -m peers tests/integration/engines
	$(TRAIN)/bin/python -m pytest -m peers tests/integration/benchmarks

# Somebody else's `models/` and `scheduler/` stand where the command is called, and must not be taken for ours.
wheel:
	rm -rf $(BUILT) && mkdir -p $(BUILT)/elsewhere/models $(BUILT)/elsewhere/scheduler
	touch $(BUILT)/elsewhere/models/__init__.py $(BUILT)/elsewhere/scheduler/__init__.py
	$(PYTHON) -m venv $(BUILT)/venv
	$(BUILT)/venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(BUILT) .
	$(BUILT)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$$(echo $(BUILT)/terrace_inference-*.whl)[$(EXTRA)]"
	cd $(BUILT)/elsewhere && $(BUILT)/venv/bin/terrace demo --json

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory check-page

# The modules of the page against the types in their comments. The compiler comes from npm, where that is at hand.
check-page: $(TSC)/.ready
	@if [ -x $(TSC)/node_modules/.bin/tsc ]; then $(TSC)/node_modules/.bin/tsc -p scheduler/web/tsconfig.json; \
	else echo 'check-page: skipped, for want of npm or of its package typescript'; fi

$(TSC)/.ready:
	@mkdir -p $(TSC)
	@! command -v npm > /dev/null || npm install --silent --no-fund --no-audit --prefix $(TSC) typescript@7.0.2 || true
	@touch $@

docs: $(VENV)/.dev
	$(VENV)/bin/zensical build --strict

format: $(VENV)/.dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(TRAIN) $(RAY) .venv-peers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
