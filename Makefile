# leakbound: `make audit` and `make test` do everything from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup audit test test-slow check bench notebooks clean
.DEFAULT_GOAL := audit

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "installing leakbound and its pinned dependencies into .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	@touch $@

audit: setup
	$(BIN)/leakbound audit

test: setup
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -n auto -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

notebooks: setup
	$(BIN)/python docs/notebooks/execute.py

clean:
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
