# Everything runs in .venv, made here: python3 (3.11 to 3.14) with venv, make and a C compiler are enough.
PYTHON ?= python3
CUDNN ?= cu12
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs bench bench-check clean

# Made again when the dependencies or the choice of cuDNN change. cuDNN-full and cuDNN-JIT cannot share an environment.
STAMP := $(VENV)/.installed-$(CUDNN)
$(STAMP): pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[$(CUDNN)]' --group dev
	touch $@

demo: $(STAMP)
	$(BIN)/plancache demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# What a user would pick instead of plancache, to be measured against.
BENCH_STAMP := $(VENV)/.installed-bench-$(CUDNN)
$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --group bench
	touch $@

# All benchmarks, in about 10 minutes on 2 cores; writes benchmarks/results and the tables of docs/benchmarks.md.
bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.all

# Fails if a ratio is worse than the bound beside its benchmark.
bench-check: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.all --quick

# The site in site/, from pages whose generated parts are written anew.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
