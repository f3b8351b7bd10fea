# Every target sets itself up: Python 3.12 or newer and a network to PyPI are all it takes.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test test-slow lint types lock clean setup

demo: setup
	$(BIN)/jspark demo $(ARGS)

test: lint types
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu" $(ARGS)

test-slow: setup
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

setup: $(VENV)/.installed

$(VENV)/.installed: requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "jspark needs Python 3.12 or newer: install it, or say make PYTHON=/path/to/python3.12"; exit 2; }
	@echo "setting up $(VENV) (about 1 GB, once)"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

# Needs uv. Hashes and names only: no index or host ends up in the files.
UV_COMPILE = uv pip compile pyproject.toml --constraint requirements/constraints.in --universal --python-version 3.12 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet
lock:
	$(UV_COMPILE) --output-file requirements/cpu.txt
	$(UV_COMPILE) --extra dev --extra train --output-file requirements/dev.txt
	$(UV_COMPILE) --extra cuda12 --output-file requirements/cuda12.txt
	$(UV_COMPILE) --extra cuda13 --output-file requirements/cuda13.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
