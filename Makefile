# Strandline. `make` alone lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
# A virtual environment that happens to be active must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
# Slots are processes that start often: without bytecode each of them compiles Arrow, NumPy and Spark's types anew.
unexport PYTHONDONTWRITEBYTECODE

# Arguments for the tools: `make test ARGS="-k kill"`, `make bench ARGS="value-state --rows 1000000 --keys 100000"`.
ARGS ?=
# Folders with Python code; those that do not exist are left out.
CODE := $(wildcard src tests bench examples scripts)

.PHONY: help setup demo check test test-matrix second-store mini-hdfs lint format typecheck bench docs clean lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## Java, .venv and the locked dependencies; quick when there is nothing to do
	@bash scripts/setup.sh

demo: setup ## count a click stream, kill a slot in the middle, check the result
	@$(BIN)/strandline demo $(ARGS)

check: setup ## lint, format, types, and the tests without Spark on fewer examples; under two minutes
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	STRANDLINE_EXAMPLES=30 $(BIN)/pytest -q -n 2 -m "not spark and not faults and not slow" $(ARGS)

test: setup ## every check: lint, format, types, all tests; about twenty minutes
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --durations=30 --durations-min=4 $(ARGS)

test-matrix: setup ## the runtime tests on every supported Spark and Python, e.g. ARGS="--spark 4.1 --python 3.13"
	@$(BIN)/python scripts/test_matrix.py $(ARGS)

second-store: ## install versitygw, the second S3 server of the storage tests, into .tools/ (needs Go)
	GOBIN=$(CURDIR)/.tools go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

mini-hdfs: ## fetch Hadoop's mini cluster, for the tests of hdfs://, into .tools/ (needs Maven)
	mvn -q -B -f scripts/mini_hdfs.xml dependency:copy-dependencies -DincludeScope=runtime \
		-DoutputDirectory=$(CURDIR)/.tools/hadoop

lint: setup ## ruff's rules
	$(BIN)/ruff check $(CODE)

format: setup ## format the code and sort its imports
	$(BIN)/ruff check --fix --fix-only --quiet $(CODE)
	$(BIN)/ruff format $(CODE)

typecheck: setup ## mypy, strict, over all code
	$(BIN)/mypy

bench: setup ## measure, e.g. ARGS="value-state --rows 1000000 --keys 100000"
	@$(BIN)/strandline bench $(ARGS)

docs: setup ## build the site of the documentation into site/, offline; a broken link is an error
	@$(BIN)/python scripts/check_docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python scripts/check_docs.py site

clean: ## remove caches and build output; keeps .venv and .matrix
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info bench/*.egg-info bench/build

lock: ## write requirements.lock anew from pyproject.toml (ARGS=--upgrade for newer versions)
	@bash scripts/lock.sh $(ARGS)
