# Development tasks. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
# The tests wait more than they compute.
PYTEST := $(BIN)/python -m pytest --dist worksteal
export HYPOTHESIS_PROFILE ?= default

.DEFAULT_GOAL := help
.PHONY: help install demo demo-cluster test test-fast lint format bench lock clean nightly bench-autoscaling bench-cluster cluster-tools test-cluster vllm-engines test-vllm test-demonstrations

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml requirements-dev.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(UV) || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements-dev.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

install: $(VENV)/.installed ## Make .venv with all that development needs

demo: install ## Run the daemon against an embedded fleet: a day's traffic, then a report
	$(BIN)/autoscaler demo

demo-cluster: install cluster-tools ## The same on a real control plane on this machine, in real time
	$(BIN)/autoscaler demo --cluster

test: test-fast test-cluster ## Run all tests

test-fast: install ## Those that need no cluster (gets Debian's prometheus and chromium where it may)
	@tests/install-debian
	$(PYTEST) -n 4 -m "not cluster and not vllm"

test-cluster: install cluster-tools ## Those against a real control plane, one a worker
	$(PYTEST) -n 6 tests/cluster

cluster-tools: ## Build the Kubernetes commands that the cluster tests run (seven minutes, once a version)
	@tests/cluster/build-tools

test-vllm: install vllm-engines ## Those against real vLLM servers, two at a time
	$(PYTEST) -n 2 -m "not demonstration" tests/vllm

test-demonstrations: install vllm-engines ## That the daemon finds limits of a real vLLM by itself (ten minutes)
	$(PYTEST) -s -m demonstration tests/vllm

vllm-engines: install ## Install CPU builds of vLLM for them (9 GB on disk, a minute or two, once a version)
	@tests/vllm/install-engines

nightly: install ## The property tests over at least 100,000 ticks
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "" tests/core/test_properties.py --timeout 3600

lint: install ## Ruff and mypy, strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## Measure: parser, decide, replay, recording, the hook inside vLLM, start
	$(BIN)/python -m bench

bench-cluster: install cluster-tools ## Measure on a real control plane: reaction beside a real HPA, and 200 failovers
	$(BIN)/python -m bench reaction
	$(BIN)/python -m bench failover

bench-autoscaling: install ## Policies on request traces, simulated: make bench-autoscaling TRACES=dir (hours; resumable)
	$(BIN)/python -m bench autoscaling --traces $(TRACES) --sweep --ablations $(if $(wildcard docs/benchmark/tuned.json),--tuned docs/benchmark/tuned.json) --jobs 2 --resume docs/benchmark/results.jsonl --page docs/benchmark.md

lock: ## Resolve the development environment again
	$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  --group dev pyproject.toml --extra nvml --extra report -o requirements-dev.lock

clean: ## Remove what was built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
