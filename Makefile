# make train      a Llama on a rank for each GPU here, or on two on the CPU, on the source text of Python's standard
#                 library; ends with a page about the run, and a sample. RANKS=4 for so many
# make test       the tests                    make check   formatter, linters, first sentences, words, type checker
# make test TORCH=2.11.0     the same on another torch, in .venv-2.11.0; so other targets
# make quick      the inner loop's: units, and exactness at one and two ranks, in under two minutes
# make nightly    the tests, with the long and exhaustive ones that are marked `nightly`
# make chaos      50 kills, freezes and full disks of training runs, some minutes; ARGS="--events 5 --seed 1"
# make site       the pages of docs/ and the reference of the library, into site/; ARGS=serve shows them as they change
# make playground the page of it on which one changes a schedule: npm fetches Python for the browser. Then any file
#                 server serves it: python3 -m http.server --directory site/playground
# make release-check    version, wheel and sdist, the README on the wheel alone, pages, site and links, licences
# make bench      step time against FSDP2      make format  formats and applies the linter's safe fixes
# make gpu-check  what needs CUDA, by what tells most first, eight minutes at most, with the interpreter named by PYTHON;
#                 installs nothing. WHEELS=DIR has what it lacks; ARGS=--plan shows its steps: docs/gpu.md
# make gpu-wheels    makes that folder, WHEELS=wheels, for Python 3.12; ARGS='--python 3.11'

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
BIN := $(VENV)/bin
RANKS ?= auto
ARGS ?=
WHEELS ?=
WORKERS ?= 2
.PHONY: train sample test nightly quick chaos check site playground release-check format bench gpu-check gpu-wheels clean
.DEFAULT_GOAL := test

# Each stamp records that an installation finished, so it is repeated only when what it depends on changed.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

# Another torch brings along what it pins itself, triton for instance.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@sed -E 's/^torch==.*/torch==$(TORCH)/; /^triton==/d' constraints.txt > $@

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable

$(VENV)/.train: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV) what training needs (torch is large)"
	@$(INSTALL) '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV) what development needs (torch is large)"
	@$(INSTALL) '.[dev]'
	@touch $@ $(VENV)/.train

train: $(VENV)/.train
	@$(BIN)/python -m train launch --ranks $(RANKS) clm --calibrate $(ARGS)
	@$(BIN)/python -m train report
	@OMP_NUM_THREADS=1 $(BIN)/python -m train sample  # a byte at a time: threads would only wait for each other

sample: $(VENV)/.train
	@$(BIN)/python -m train sample $(ARGS)

# In two processes, each with rank processes of its own: most tests leave one of two cores idle. In the order of files:
# by itself xdist leaves those of few tests to the end, and the longest tests are in such. Modules are compiled
# before, once: some hundred processes import them.
test: $(VENV)/.dev
	@$(BIN)/python -m compileall -q -j 0 yafsdp_fn models train benchmarks tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

nightly:
	@$(MAKE) test ARGS='--nightly $(ARGS)'

QUICK := params proof/test_verify.py program/test_program.py program/test_hazards.py program/test_trace.py \
	runtime/test_session.py runtime/test_visit.py runtime/test_memory.py optim/test_step.py \
	steps/test_exact_gradients.py steps/test_builders.py

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q --max-world 2 $(addprefix tests/,$(QUICK)) $(ARGS)

chaos: $(VENV)/.dev
	@$(BIN)/python -m tests.chaos $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docstrings yafsdp_fn models train benchmarks
	$(BIN)/python -m benchmarks reading --budgets
	$(BIN)/mypy

site: $(VENV)/.dev  # without the notice that the theme has a successor
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build)
	@$(if $(ARGS),,$(if $(shell command -v npm),$(MAKE) --no-print-directory playground,echo 'no npm here: the playground of the site has no Python'))

playground:
	@$(PYTHON) docs/playground/build.py build site/playground
	@echo "site/playground is built; to look at it: $(PYTHON) -m http.server --directory site/playground"

release-check: $(VENV)/.dev
	$(BIN)/python -m pytest -q --nightly $(addprefix tests/,test_release.py test_wheel.py test_readme.py \
		test_site.py test_contributing.py program/test_json_schema.py) $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks $(ARGS)

gpu-check:
	@$(PYTHON) .ci/gpu_check.py $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-wheels: $(VENV)/.dev
	@$(BIN)/python .ci/wheels.py $(or $(WHEELS),wheels) $(ARGS)

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
