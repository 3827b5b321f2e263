# leakbound: `make audit` and `make test` do everything from a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Without bytecode, pytest rewrites the asserts of 400 files in every run: 15 seconds.
unexport PYTHONDONTWRITEBYTECODE
# `make test PKG=attacks`: the tests of one package, and the examples in its docstrings.
PATHS := $(if $(PKG),$(wildcard tests/$(PKG) tests/test_$(PKG).py src/leakbound/$(PKG) src/leakbound/$(PKG).py))

.PHONY: setup audit proof release test test-long durations test-slow test-reproductions fuzz check bench bench-setup bench-all notebooks docs clean
.DEFAULT_GOAL := audit

setup: .venv/.installed

.venv/.installed: pyproject.toml reproductions/pyproject.toml constraints.txt
	@echo "installing leakbound and its pinned dependencies into .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]' -e ./reproductions
	@touch $@

audit: setup
	$(BIN)/leakbound audit

# Before a release: the built-in audit, every paper's claims, measured again into ./runs, and every
# statement against every adversary.
proof: audit
	$(BIN)/leakbound reproduce all --scale minutes
	$(BIN)/python -m pytest -m slow tests/red_team

# After `make proof`, on a tagged commit: sdists, wheels, their list of parts and checksums in dist/.
release: setup
	$(BIN)/python tools/release.py $(if $(KEY),--key $(KEY))

# CI runs it with other PATHS; the files that take longest begin.
MARKS := not slow and not long
test: setup
	$(if $(PKG),$(if $(PATHS),,$(error PKG is $(PKG), which no package or module has as its name)))
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "$(MARKS)" $(PATHS)

test-long: setup
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "long and not slow" $(PATHS)

# What takes over a second is long: measured here, on an idle machine, and kept in a file.
durations: setup
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" --record-durations tests src reproductions

test-reproductions: setup
	$(BIN)/python -m pytest -n auto -m "not slow" reproductions

test-slow: setup
	$(BIN)/python -m pytest -n auto --dist loadfile -m slow tests src reproductions

# Malformed files of every format, for an hour; inputs that fail are kept in runs/fuzz.
fuzz: setup
	$(BIN)/python tests/fuzz --seconds 3600 --seed $$(date +%s) --keep runs/fuzz

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint.py
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/prose.py --readability
	$(BIN)/python tools/size.py
	$(BIN)/python tools/words.py

# Peers live in an environment of the benchmark's own: theirs would break ours.
bench: bench-setup
	.bench-env/bin/python benchmarks/engines.py

bench-setup: .bench-env/.installed

.bench-env/.installed: pyproject.toml constraints.txt benchmarks/peers/requirements.txt
	@echo "installing leakbound and its peers into .bench-env (a few minutes, once)"
	@$(PYTHON) -m venv .bench-env
	@(.bench-env/bin/python -m pip install -c constraints.txt -e '.[data,report,dp]' && \
	  .bench-env/bin/python -m pip install --no-deps -r benchmarks/peers/requirements.txt) \
	  >.bench-env/pip.log 2>&1 || { echo "pip failed: see .bench-env/pip.log"; exit 1; }
	@touch $@

bench-all: setup
	@set -e; for script in $(filter-out benchmarks/engines.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script; done

notebooks: setup
	$(BIN)/python docs/notebooks/execute.py

# The site, every link checked, into ./site; its pages open in a browser without a server.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site \
	  >.venv/docs.log 2>&1 || { grep -v "^INFO" .venv/docs.log; exit 1; }
	@echo "open site/index.html"

clean:
	rm -rf .venv .bench-env dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
