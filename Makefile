# make train      a Llama on two local ranks, on the source text of Python's standard library; ends with a sample
# make test       the tests                    make check   formatter, linter, type checker
# make bench      step time against FSDP2      make format  formats and applies the linter's safe fixes
# make gpu-check  the checks that need CUDA, with the interpreter named by PYTHON; installs nothing

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
ARGS ?=
# One thread per core over all ranks: more would fight for cores with the threads of the collectives.
THREADS ?= $(shell $(PYTHON) -c 'import os; print(max(1, (os.cpu_count() or 1) // $(RANKS)))')
TORCHRUN = OMP_NUM_THREADS=$(THREADS) $(BIN)/torchrun --standalone --nproc-per-node $(RANKS)

.PHONY: train sample test check format bench gpu-check clean
.DEFAULT_GOAL := test

# Each stamp records that an installation finished, so it is repeated only when what it depends on changed.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, this is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.train

train: $(VENV)/.train
	@$(TORCHRUN) -m train clm $(ARGS)
	@$(BIN)/python -m train sample

sample: $(VENV)/.train
	@$(BIN)/python -m train sample $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	@$(TORCHRUN) -m train bench $(ARGS)

gpu-check:
	@$(PYTHON) .ci/gpu_check.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
