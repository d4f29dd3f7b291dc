# make help says what there is. Everything runs in .venv, which each target makes and fills as far as it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

export VENV ?= .venv
BIN := $(VENV)/bin
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PIPELINES ?= smol-voice
HOST ?=
PORT ?=
SERVE_ARGS ?=
PYTEST_ARGS ?=

# A stamp is as new as the requirement files it was made from: the second run installs nothing.
VENV_STAMP := $(VENV)/.stamp-venv
RUNTIME_STAMP := $(VENV)/.stamp-runtime-$(DEVICE)
PACKAGES_STAMP := $(VENV)/.stamp-packages
DEV_STAMP := $(VENV)/.stamp-dev
CLIENT := $(wildcard clients/python/pyproject.toml)

.PHONY: help serve env env-dev toolchains test check format protos clean bench
.PHONY: check-format check-lint check-types check-imports check-protos check-stubs check-functions check-manifests

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)
	@echo "Variables: PIPELINES='$(PIPELINES)' HOST PORT SERVE_ARGS (serve) · PYTEST_ARGS (test) · DEVICE=$(DEVICE) PYTHON VENV=$(VENV)"

serve: env ## a running server with real models: installs, prepares the models, serves
	@echo "==> serving $(PIPELINES) on $(DEVICE)"
	@exec $(BIN)/omni-grpc serve $(foreach name,$(PIPELINES),--pipeline $(name)) \
	  $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(SERVE_ARGS)

env: $(PACKAGES_STAMP) ## .venv with what the server needs
env-dev: env $(DEV_STAMP) ## .venv with the tools too

$(VENV_STAMP):
	@scripts/environment venv
	@touch $@

$(RUNTIME_STAMP): requirements/base.txt requirements/embedded.txt requirements/$(DEVICE).txt | $(VENV_STAMP)
	@scripts/environment runtime $(DEVICE)
	@touch $@

$(DEV_STAMP): requirements/dev.txt requirements/apart.txt $(RUNTIME_STAMP)
	@scripts/environment dev
	@touch $@

$(PACKAGES_STAMP): pyproject.toml $(CLIENT) $(RUNTIME_STAMP)
	@scripts/environment packages
	@touch $@

# The clients' own: a machine that has them not, and may not install them, tests the rest.
toolchains: ## what builds the clients in Go, Java and TypeScript; installs Debian's packages as root
	@scripts/toolchains || echo "==> tests of clients that cannot be built here will be reported as not run"

test: check toolchains ## all checks, then all tests
	@echo "==> tests"
	@status=0; $(BIN)/python -m pytest $(PYTEST_ARGS) || status=$$?; \
	  if [ $$status -eq 1 ]; then \
	    echo "==> tests that failed, once more and by themselves: a pass here means that one depends on a busy machine"; \
	    status=0; $(BIN)/python -m pytest --last-failed $(PYTEST_ARGS) || status=$$?; \
	  fi; exit $$status

check: check-format check-lint check-types check-imports check-protos check-stubs check-functions check-manifests ## all checks, no tests
	@echo "==> all checks passed"

check-format: env-dev
	@echo "==> format"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/buf format --diff --exit-code

check-lint: env-dev
	@echo "==> lint"
	@$(BIN)/ruff check --quiet .

check-types: env-dev
	@echo "==> types"
	@$(BIN)/mypy

check-imports: env-dev
	@echo "==> imports"
	@$(BIN)/lint-imports --no-logo

# The image is the contract of the last release: a field that clients use can't be renamed or renumbered.
check-protos: env-dev
	@echo "==> contract"
	@$(BIN)/buf lint
	@if [ -e protos/released.binpb ]; then $(BIN)/buf breaking --against protos/released.binpb; fi

check-stubs: env-dev
	@echo "==> stubs"
	@PYTHON=$(BIN)/python scripts/check_stubs

check-functions: env-dev
	@echo "==> function length"
	@$(BIN)/python scripts/check_functions.py

check-manifests: env-dev
	@echo "==> manifests and image"
	@$(BIN)/python scripts/check_manifests.py
	@$(BIN)/hadolint Dockerfile

protos: env-dev ## the Python stubs of the contract, regenerated
	@echo "==> generating omni_grpc/v1"
	@PYTHON=$(BIN)/python scripts/gen_protos

format: env-dev ## formats and fixes what can be fixed
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/buf format --write

ifneq ($(wildcard bench/__main__.py),)
bench: env-dev
	@$(BIN)/python -m bench
endif

clean: ## removes .venv and every cache of the tools
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist \
	  clients/*/build clients/node/gen clients/node/node_modules
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
