# The two commands of the README are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/shoal/v1/*.proto)
STAMP := $(VENV)/.installed
SEEDS ?= 1000
FIRST ?= 1

.PHONY: help demo test sim lint lab-up lab-load lab-chaos lab-down lab-test bench proto format clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 18

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing Shoal and what it needs into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25'
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Pull the default model, start three emulated devices, chat once, stop
	@$(BIN)/shoal demo

test: $(STAMP)  ## Run all tests
	@$(BIN)/python -m pytest

sim: $(STAMP)  ## Play seeds of the simulated fleet: SEEDS=20000, from FIRST=1 on
	@$(BIN)/python -m tests.simulation.run --seeds $(SEEDS) --first $(FIRST)

lint: $(STAMP)  ## Check style, types, layers, protos and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m tests.generated_drift

lab-up: $(STAMP)  ## Run five devices in containers; needs a Docker engine (docs/lab.md)
	@$(BIN)/shoal lab up

lab-load: $(STAMP)  ## Put the lab under load for a minute
	@$(BIN)/docker-compose --profile load run --rm loadtest

lab-chaos: $(STAMP)  ## Kill, freeze and cut off parts of the lab while it answers
	@$(BIN)/python -m tests.lab.chaos

lab-down: $(STAMP)  ## Take the lab down, with all it has stored
	@$(BIN)/shoal lab down

lab-test: $(STAMP)  ## All of that on a Docker engine of its own: needs root and docker.io
	@$(BIN)/shoal models pull smollm2-135m
	@$(BIN)/python -m tests.lab.engine $(BIN)/python -m tests.lab.run $(LAB_OPTIONS)

bench: $(STAMP)  ## Measure; results go to docs/results
	@$(BIN)/python -m tests.bench.run

proto: $(STAMP)  ## Generate shoal/v1 anew from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the targets made here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
