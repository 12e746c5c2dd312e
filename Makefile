# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# The commands of the project. Each one makes the environment first (3 to 4 minutes the first time, 1 s after that), so
# that any of them works from a fresh clone; `make docs` makes a small one of its own. PYTHON, TORCH_INDEX and CXX: see
# tests/environment/setup.sh.

.DEFAULT_GOAL := help
.PHONY: help setup demo test kernels bench explore soak afd-soak engine docs lint format clean clean-all

BIN := .venv/bin
# Test files at a time. Each takes about 2 GiB of memory while it runs engines.
JOBS ?= 2
# Tests and benchmarks run on the software NPU; a real one is what `make demo` takes where there is one.
ON_SOFTNPU = $(BIN)/python -m afd_dsv4.softnpu --
KERNEL_TESTS = $(wildcard tests/ascendc tests/unit/test_kernel*.py tests/property/test_kernel*.py \
	tests/property/test_tiles.py tests/integration/test_executor_operators.py tests/integration/test_executor_runtime.py)
NATIVE_SOURCES = $(shell git ls-files '*.c' '*.cc' '*.cpp' '*.h' '*.hpp')

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|'

setup: ## the exact test environment in .venv, and in build/softnpu the software NPU and the kernels in emulation
	@bash tests/environment/setup.sh

demo: setup ## the claim, measured: the evidence run, on a real NPU where there is one; ARGS go to `afd-dsv4 evidence`
	@$(BIN)/python -m afd_dsv4 evidence --out build/evidence $(ARGS)

test: setup ## every test, on the software NPU; ARGS go to pytest; JOBS=0: in one process, as a debugger wants it
	@AFD_DSV4_REQUIRE_NPU=1 $(ON_SOFTNPU) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

kernels: setup ## our kernels in emulation: their tests, a sweep against the definition, their figures; ARGS: --cases, --seed
	@AFD_DSV4_REQUIRE_NPU=1 $(ON_SOFTNPU) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(KERNEL_TESTS)
	@$(BIN)/python -m tests.kernels_sweep $(ARGS)
	@$(BIN)/python -m afd_dsv4 kernels report

bench: setup ## benchmarks; ARGS go to pytest
	@$(ON_SOFTNPU) $(BIN)/python -m pytest benchmarks --benchmark-only $(ARGS)

explore: setup ## schedules of small programs on the real arena, and every planted fault; ARGS: --seed, --budget
	@$(BIN)/python -m tests.explorer $(ARGS)

soak: setup ## a random load with faults on the software NPU, every byte compared; ARGS: --seed, --executions, --rounds
	@$(ON_SOFTNPU) $(BIN)/python -m afd_dsv4.evidence.soak $(ARGS)

afd-soak: setup ## uBatches and stages of AFD, with a fault at every point of their life; ARGS: --seed, --stages, --ranks, --mode (cam, dbo, sync)
	@$(ON_SOFTNPU) $(BIN)/python -m tests.afd.soak $(ARGS)

engine: setup ## the real vLLM and vllm-ascend on the software NPU, native against plugin; ARGS: --workloads, --seed, --out
	@$(BIN)/python -m afd_dsv4.evidence.engine $(ARGS)

docs: build/docs-env/ready ## the pages of docs/ as a site in build/site; fails at a link that leads nowhere
	@build/docs-env/bin/mkdocs build --clean # never with --quiet, which keeps warnings from being counted

build/docs-env/ready: tests/environment/docs.txt
	@$(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m venv --clear build/docs-env
	@build/docs-env/bin/python -m pip --disable-pip-version-check install -q --no-deps -r tests/environment/docs.txt
	@touch $@

lint: setup ## every static check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES))

format: setup ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

clean: ## what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks .import_linter_cache

clean-all: clean ## and the environment
	rm -rf .venv
