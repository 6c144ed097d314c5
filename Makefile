# The two commands of the README are `make demo` and `make test`; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/shoal/v1/*.proto)
STAMP := $(VENV)/.installed
SEEDS ?= 1000
FIRST ?= 1

.PHONY: help demo test sim lint bench proto format clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

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

bench: $(STAMP)  ## Measure; results go to docs/results
	@$(BIN)/python -m tests.bench.run

proto: $(STAMP)  ## Generate shoal/v1 anew from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the targets made here
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
