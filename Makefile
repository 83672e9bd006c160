# make tune       set up and tune the smallest model on this machine
# make box        bring up a cluster in a box (two nodes in network namespaces), tune in it, remove it; KEEP=1 keeps it up
# make test       set up, test services included, and run the tests that a change needs, in two processes
# make test-all   the same with every test, those marked slow included
# make test-frameworks  set training frameworks up in .frameworks and run the tests that need them
# make mutants    change 200 random lines, one at a time, and see whether the unit tests notice
#
# Variables: PYTHON (an interpreter, 3.11 or newer), TORCH_INDEX_URL (a package index to take torch from, for
# example one of CPU wheels), ARGS (passed on to autotune or pytest).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.PHONY: setup services tune box box-down test test-all test-frameworks mutants lint check clean

setup: $(STAMP)

$(STAMP): pyproject.toml deploy/setup.sh
	bash deploy/setup.sh python $(VENV)
	touch $@

services:
	bash deploy/setup.sh services

tune: setup
	$(BIN)/autotune tune $(ARGS)

# Network namespaces need root.
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo)

box: setup services
	$(AS_ROOT) $(BIN)/python -m deploy.box run $(if $(KEEP),--keep) $(ARGS)

box-down: setup
	$(AS_ROOT) $(BIN)/python -m deploy.box down $(ARGS)

test: setup services
	$(BIN)/python -m pytest -n 2 -m "not slow and not frameworks" $(ARGS)

test-all: setup services
	$(BIN)/python -m pytest -n 2 -m "not frameworks" $(ARGS)

# They train on CPU ranks, for minutes each; FRAMEWORKS is where their environments are.
FRAMEWORKS := .frameworks
test-frameworks: setup
	bash deploy/setup.sh frameworks $(FRAMEWORKS)
	FRAMEWORKS=$(abspath $(FRAMEWORKS)) $(BIN)/python -m pytest -n 0 -m frameworks tests/frameworks $(ARGS)

# Would the unit tests notice a wrong line? On a copy; ARGS names a package or file, or --json.
SAMPLE := 200
SEED := 1
mutants: setup
	$(BIN)/python benchmarks/mutants.py --sample $(SAMPLE) --seed $(SEED) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check:
	bash .ci/run

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
