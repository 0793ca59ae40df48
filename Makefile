# Two environments: the operator's (.venv, from requirements.lock) and the application's, which
# trainer/environment.py builds once per machine from trainer/requirements.txt.
# PYTHON picks the interpreter of both; RUN picks the run.json of `make demo`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
RUN ?= examples/local.json
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
CODE := $(wildcard workflows activities worker trainer tests bench examples)

# A stamp is named after what was installed, so another lock file or interpreter means a new environment.
KEY := $(shell { cat requirements.lock; $(PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)'; } 2>/dev/null | sha256sum | cut -c1-16)
DEV_KEY := $(shell cat requirements-dev.lock 2>/dev/null | sha256sum | cut -c1-16)
OPERATOR := $(VENV)/.operator-$(KEY)
DEV := $(VENV)/.dev-$(KEY)-$(DEV_KEY)

TRAINER_TEST := $(VENV)/trainer-test-$(shell cat requirements-trainer-test.lock 2>/dev/null | sha256sum | cut -c1-16)

.PHONY: help demo stack test test-operator test-trainer bench lint format schema lock operator dev application clean

help: ## say what there is to do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: operator application ## carry one guarded run from start to verdict on the embedded services (RUN=path/to/run.json)
	@exec $(BIN)/python -m worker demo --run '$(RUN)'

stack: operator application ## the embedded services and a worker in the foreground, until Ctrl-C; writes .lanyard/env
	@exec $(BIN)/python -m worker stack

test: test-operator test-trainer ## all tests, each in the environment of what it tests

test-operator: dev application ## tests of workflows, activities, worker (TESTS='tests/worker -k stack' for some)
	@$(BIN)/python -m pytest --ignore tests/trainer $(TESTS)

test-trainer: dev application $(TRAINER_TEST) ## tests of trainer, in the application's environment
	@PYTHONPATH=$(TRAINER_TEST):. "$$($(BIN)/python -m trainer.environment path)/bin/python" -B -m pytest tests/trainer

bench: dev application ## the benchmarks; writes bench/results.json
	@exec $(BIN)/python -m bench

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

operator: $(OPERATOR) ## build the operator's environment (.venv)

dev: $(DEV)

application: operator ## build the application's environment (shared by every checkout of this user)
	@echo 'application environment: verifying, or building it (the first time takes minutes)'
	@$(BIN)/python -m trainer.environment ensure

lock: ## resolve both operator lock files again
	@place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; $(PYTHON) -m venv "$$place"; \
	"$$place"/bin/python -m pip install --quiet --disable-pip-version-check pip-tools; \
	for name in requirements requirements-dev; do \
	    echo "resolving $$name.in"; \
	    "$$place"/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
	        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o $$name.lock $$name.in; \
	done

clean: ## remove environments and caches of this checkout, never .lanyard (runs and their evidence)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(OPERATOR): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    version=$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing); \
	    echo "Lanyard needs Python 3.11 or later; $(PYTHON) is $$version." >&2; \
	    echo "Install one and name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo 'operator environment: building $(VENV) (about a minute)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(call install,requirements.lock)
	@$(BIN)/python -m pip check --disable-pip-version-check > /dev/null
	@touch $@

$(DEV): $(OPERATOR) requirements-dev.lock
	@echo 'operator environment: adding what tests and lint need'
	@$(call install,requirements-dev.lock)
	@rm -f $(VENV)/.dev-*
	@touch $@

$(TRAINER_TEST): $(OPERATOR) requirements-trainer-test.lock
	@rm -rf $@ $@.part
	@$(call install,requirements-trainer-test.lock --target $@.part)
	@mv $@.part $@

# $(call install,FILE): exact versions and hashes from FILE; pip is heard only when it fails.
install = $(BIN)/python -m pip install --quiet --progress-bar off --disable-pip-version-check --no-deps \
    --require-hashes -r $(1) > $(VENV)/pip.log 2>&1 || { tail -n 20 $(VENV)/pip.log >&2; \
    echo "installing $(1) failed (above; all of it in $(VENV)/pip.log)" >&2; exit 1; }
