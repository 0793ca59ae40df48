# Two environments: the operator's (.venv, from requirements.lock) and the application's, which
# trainer/environment.py builds once per machine from trainer/requirements.txt.
# PYTHON picks the interpreter of both; RUN picks the run.json of `make demo` and the run of `make inspect`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export PYTHON ?= python3
RUN ?= examples/local.json
TESTS ?=
SUBMISSION ?=
# Of `make chaos`: which scenarios (a seed gives the same ones), words that their names have, and which part of them.
SLICE ?= light
SEED ?= 0
ONLY ?=
SHARD ?= 1/1
CHAOS ?=
VENV := .venv
BIN := $(VENV)/bin
CODE := $(wildcard workflows activities worker trainer tests bench examples)

.PHONY: help demo stack test test-operator test-trainer test-hosts skypilot bench chaos search inspect lint format schema lock operator dev trainer-test \
    application clean

help: ## say what there is to do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: operator application ## carry one guarded run from start to verdict on the embedded services (RUN=path/to/run.json)
	@exec $(BIN)/python -m worker demo --run '$(RUN)'

stack: operator application ## the embedded services and a worker in the foreground, until Ctrl-C; writes .lanyard/env
	@exec $(BIN)/python -m worker stack

test: test-operator test-trainer ## all tests, each in its own environment (TESTS='tests/worker -k stack' for some)

test-operator: dev application
	@$(if $(findstring tests/trainer,$(TESTS)),:,$(BIN)/python -m pytest --ignore tests/trainer $(TESTS))

test-trainer: trainer-test application
	@$(if $(or $(findstring tests/trainer,$(TESTS)),$(if $(TESTS),,all)),PYTHONPATH=$(VENV)/trainer-test:. \
	    "$$($(BIN)/python -m trainer.environment path)/bin/python" -B -m pytest $(or $(TESTS),tests/trainer),:)

test-hosts: dev application skypilot ## tests on a real SkyPilot and a real Slurm (root; see tests/hosts/slurm.sh)
	@$(BIN)/python -m pytest -m hosts $(or $(TESTS),tests/hosts)

search: dev ## look for new counter-examples to the properties (thousands of examples each)
	@HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest $$(grep -rl 'from hypothesis' tests --include='test_*.py')

inspect: application ## check a run's artifacts again, from storage alone (RUN=s3://bucket/prefix/RUNKEY SUBMISSION=)
	@exec "$$($(BIN)/python -m trainer.environment path)/bin/python" -B -m trainer.inspect_results '$(RUN)' \
	    $(if $(SUBMISSION),--submission '$(SUBMISSION)')

bench: dev application ## the benchmarks; writes bench/results.json
	@exec $(BIN)/python -m bench

chaos: dev application ## strike runs at every instant and judge what is left (SLICE=light|real|all SEED= ONLY= SHARD=1/3)
	@exec $(BIN)/python -m tests.chaos --slice '$(SLICE)' --seed '$(SEED)' --only '$(ONLY)' --shard '$(SHARD)' $(CHAOS)

lint: dev ## ruff, mypy --strict and the layers
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy $(CODE)
	@$(BIN)/lint-imports

format: dev ## let ruff format the code and mend what it can
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

schema: operator ## generate schema/run.schema.json from the code
	@mkdir -p schema
	@$(BIN)/python -m worker schema > schema/.run.schema.json
	@mv schema/.run.schema.json schema/run.schema.json
	@echo 'wrote schema/run.schema.json'

operator: ## build the operator's environment (.venv)
	@scripts/operator-environment.sh operator

dev:
	@scripts/operator-environment.sh dev

trainer-test:
	@scripts/operator-environment.sh trainer-test

skypilot: ## build SkyPilot's own environment (.venv-skypilot), for hosts.provider skypilot
	@scripts/operator-environment.sh skypilot

application: operator ## build the application's environment (shared by every checkout of this user)
	@echo 'application environment: verifying, or building it (the first time takes minutes)'
	@$(BIN)/python -m trainer.environment ensure --device cpu

lock: ## resolve the lock files again
	@place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; $(PYTHON) -m venv "$$place"; \
	"$$place"/bin/python -m pip install --quiet --disable-pip-version-check pip-tools; \
	for name in requirements requirements-dev requirements-trainer-test requirements-skypilot; do \
	    echo "resolving $$name.in"; \
	    "$$place"/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
	        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o $$name.lock $$name.in; \
	done

clean: ## remove environments and caches of this checkout, never .lanyard (runs and their evidence)
	@rm -rf $(VENV) .venv-skypilot .venv-lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# No prerequisites: a stamp's name says what it is for, and a file's date (a checkout, a touch) says nothing. One build
# at a time; an environment that works is added to in place, because a running stack may be using it.
