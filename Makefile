# Every target makes .venv and installs the pinned versions by itself: a fresh clone needs nothing but Python and make.

PYTHON ?= python3
WORKERS ?= 2
SCALE ?= 1
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
LINTED := $(wildcard src lab tests tools examples docs conftest.py)

.DEFAULT_GOAL := help
.PHONY: help venv demo format check test docs test-docs wheel coverage test-slow test-real test-browser bench bench-scoring bench-quality bench-training limits torture clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with the pinned versions (PYTHON=python3.12 picks another Python)

# The build backend is installed as a pinned tool and used without isolation: pip applies no constraints to isolated builds.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt requirements-dev.txt
	@echo "Installing into .venv ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt -r requirements-dev.txt
	@$(PIP) install -c constraints.txt --no-build-isolation -e . -e ./lab
	@$(BIN)/python -m pip --disable-pip-version-check check
	@touch $@

demo: $(STAMP) ## Show what secateurs does, from start to end
	@$(BIN)/secateurs demo

format: $(STAMP) ## Format the code and sort its imports
	@$(BIN)/ruff check --quiet --select I --fix $(LINTED)
	@$(BIN)/ruff format --quiet $(LINTED)

check: $(STAMP) ## Format, lint, types, import direction and architecture
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/ruff check --quiet --output-format concise $(LINTED)
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py

# One torch thread: the small networks of the tests only lose by a second one. Two processes, one a core.
test: check ## check, then all other default tests (WORKERS=0 runs them in one process)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --ignore=tests/test_architecture.py

docs: .venv-docs/.installed ## Build the documentation into build/docs: warnings and dead links are errors
	@.venv-docs/bin/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "Open build/docs/index.html"

# The tools of the documentation are in an environment of their own, which sees .venv.
.venv-docs/.installed: $(STAMP) requirements-docs.txt
	@rm -rf .venv-docs
	@tools/layered_env.sh .venv-docs -r requirements-docs.txt
	@touch $@

test-docs: $(STAMP) ## Run every Python block of README, tutorial and how-to pages, and the examples
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" tests/test_docs.py tests/test_readme.py tests/test_tutorial.py tests/test_examples.py

# Built without isolation, so that the pinned backend is used; tried in an environment that has nothing else.
wheel: $(STAMP) ## Build dist/*.whl, install it into a clean environment and try it there
	@rm -rf dist .venv-wheel
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@$(PYTHON) -m venv .venv-wheel
	@.venv-wheel/bin/python -m pip --quiet --quiet --disable-pip-version-check install -c constraints.txt dist/*.whl
	@cd dist && OMP_NUM_THREADS=1 ../.venv-wheel/bin/python ../tools/smoke.py
	@rm -rf .venv-wheel

coverage: $(STAMP) ## All default tests, and the lines of src that none of them reaches
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --cov --cov-report=term

test-slow: $(STAMP) ## Tests that take minutes: the demo with other seeds, all exports of all networks
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

test-real: $(STAMP) ## Tests on the real CIFAR-10 and the public weights
	@$(BIN)/python -m pytest -q -m realdata

test-browser: $(STAMP) ## Tests of the report in a real browser (skipped with a reason without playwright and Chromium)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser

bench: $(STAMP) ## Time surgery and what it brings, as ratios
	@$(BIN)/python -m benchmarks.surgery
	@$(BIN)/python -m benchmarks.xor

bench-scoring: $(STAMP) ## Time and judge the scoring of filters on the real CIFAR-10, in 5 minutes (FULL=1: hours)
	@$(BIN)/python -m benchmarks.scoring $(if $(FULL),--full)

bench-quality: $(STAMP) ## Compare what methods remove at the same loss of accuracy, on CIFAR-10 (what has no row yet; RESULTS=folder: all anew, hours)
	@QUALITY_RESULTS="$(RESULTS)" $(BIN)/python -m benchmarks.quality --all

# Rows that exist are not made again, and a row that was killed goes on: stop it and give it again as often as you like.
BUDGETS := lab/recipes/budgets
TABLE3 := $(BIN)/secateurs reproduce table3 --only
bench-training: $(STAMP) ## Make the rows of lab/notes/training.md that are missing, on CIFAR-10 (a day of a core)
	@$(TABLE3) --depth 20 --targets 0.45 0.30 --budget $(BUDGETS)/3.7-epochs-features-bfloat16.toml --methods obs+refit fpgm:uniform li --seeds 0 1 2
	@$(TABLE3) --depth 20 --targets 0.45 --budget $(BUDGETS)/3.7-epochs-features-bfloat16.toml@0.01 --methods obs+refit fpgm:uniform li
	@$(TABLE3) --depth 20 --targets 0.45 --budget $(BUDGETS)/27-epochs.toml --methods obs+refit fpgm:uniform li sfp paper
	@$(TABLE3) --depth 20 --targets 0.45 0.5 0.6 --budget $(BUDGETS)/10-epochs-labels.toml --methods untouched obs+refit fpgm:uniform li sfp paper
	@$(TABLE3) --depth 56 --targets 0.5 --budget $(BUDGETS)/10-epochs-mixup.toml --methods obs+refit fpgm:uniform
	@$(BIN)/python -m benchmarks.rounds
	@$(BIN)/python -m benchmarks.ensembles --networks resnet32 resnet56 --orders ensemble l1 fpgm --shares --targets 0.1 0.3
	@$(BIN)/python -m benchmarks.finetuning --losses cross-entropy distillation
	@$(BIN)/python -m benchmarks.finetuning_page

limits: $(STAMP) .venv-integrations/.installed ## Rewrite docs/limits.md: what can and cannot be pruned in networks of others
	@tools/limits

torture: $(STAMP) ## Generated networks, damaged files, killed runs, contracts: rewrite docs/reliability.md, hours (SCALE=0.01: a look; RESUME=1: go on)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --scale $(SCALE) $(if $(RESUME),--resume) --failures torture-failures $(if $(filter 1 1.0,$(SCALE)),--write docs/reliability.md,--results torture-failures/results.json)

clean: ## Remove the environments and what tools leave behind
	@rm -rf .venv .venv-* .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist torture-failures
	@find src lab tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: test-integrations
INTEGRATIONS := .venv-integrations/bin/python
.venv-integrations/.installed: pyproject.toml lab/pyproject.toml constraints.txt requirements-integrations.txt
	@echo "Installing into .venv-integrations ..."
	@$(PYTHON) -m venv .venv-integrations
	@$(INTEGRATIONS) -m pip --quiet --quiet --disable-pip-version-check install -c constraints.txt -r requirements-integrations.txt editables hatchling pytest
	@$(INTEGRATIONS) -m pip --quiet --quiet --disable-pip-version-check install -c constraints.txt --no-build-isolation -e '.[onnx]' -e ./lab
	@$(INTEGRATIONS) -m pip --disable-pip-version-check check
	@touch $@

test-integrations: .venv-integrations/.installed ## Tests with the real Lightning, transformers, timm and ultralytics, in .venv-integrations
	@OMP_NUM_THREADS=1 $(INTEGRATIONS) -m pytest -q tests/integrations
