# Everything runs inside .venv, which is made on first use and only updated when these files change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
BENCH  ?= schemes single_device as_shipped sharded scaling predictions launches losses choices
STAMP  := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# Some virtual machines advertise AMX but trap its instructions, which kills bfloat16 products on CPU. Nothing here needs AMX.
export ONEDNN_MAX_CPU_ISA ?= AVX10_1_512

.DEFAULT_GOAL := help
.PHONY: help train test test-paused test-models test-trainers test-torch lint bench launches check-streams mutants docs package clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 22

train: $(STAMP) ## train a small GPT with meshmuon beside AdamW; leaves a report in runs/ (ARGS="--help" for options)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Two test processes share two cores: threads that wait must sleep, not spin.
test: export OMP_WAIT_POLICY ?= passive
test: $(STAMP) ## run the tests (ARGS="-k name" to select)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-paused: export OMP_WAIT_POLICY ?= passive
test-paused: $(STAMP) ## run the tests while random processes of theirs are stopped for seconds: the clock must not decide a test
	$(BIN)/python -m tests.support.pauses -n 2 $(ARGS)

# In an environment of its own: the torchvision of PyPI is built for CUDA. Beside a CPU build of torch importing it fails, and with
# it everything that looks for it, such as Transformers' Trainer. The survey declares the operators that are missing.
MODELS_VENV  := .venv-models
MODELS_STAMP := $(MODELS_VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

test-models: export OMP_NUM_THREADS ?= 1
test-models: $(MODELS_STAMP) ## route every architecture of transformers, timm, torchvision, diffusers (ARGS="timm --list" to select)
	$(MODELS_VENV)/bin/python -W ignore -m tests.models.survey $(ARGS)

# Ray brings more packages than all tests together: in an environment of its own.
TRAINERS_VENV  := .venv-trainers
TRAINERS_STAMP := $(TRAINERS_VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

test-trainers: export OMP_NUM_THREADS ?= 1
test-trainers: $(TRAINERS_STAMP) ## run Ray Train itself
	$(TRAINERS_VENV)/bin/python -m pytest --timeout 1200 -p no:warnings tests/integrations/check_ray.py $(ARGS)

# Any other torch, in an environment of its own; of constraints.txt all but the torch that development uses. A CPU build brings no
# Triton: TRITON=3.9.0 says which.
TORCH_VENV  := .venv-torch-$(TORCH)
TORCH_STAMP := $(TORCH_VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

test-torch: export OMP_WAIT_POLICY ?= passive
test-torch: $(if $(TORCH),$(TORCH_STAMP)) ## run the tests with another torch: TORCH=2.15.0 (CUDA builds take about 6 GB each)
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.15.0"; exit 2; }
	$(TORCH_VENV)/bin/python -m pytest -n 2 $(ARGS)

$(TORCH_VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/; /^torchvision==/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	@test -z "$(TRITON)" || echo 'triton==$(TRITON)' >> $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt --editable '.[dev]'
	@$(TORCH_VENV)/bin/python -c 'import torch; assert torch.__version__.split("+")[0] == "$(TORCH)", torch.__version__'
	@rm -f $(TORCH_VENV)/.installed-* && touch $@

lint: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Contenders from PyPI are optional: the benchmarks leave out, and name, those that are not there.
bench: export OMP_WAIT_POLICY ?= passive
bench: $(STAMP) ## all benchmarks; writes benchmarks/results/ (BENCH=sharded for one, ARGS=--quick for a try)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]' || echo "contenders from PyPI are not installed"
	for script in $(BENCH); do $(BIN)/python benchmarks/$$script.py $(ARGS) || exit 1; done

launches: $(STAMP) ## count the kernels that a rank launches in a step on a GPU; writes benchmarks/results/launches.txt
	$(BIN)/python benchmarks/launches.py $(ARGS)

PROGRAMS ?= 400
FIRST    ?= 0
check-streams: $(STAMP) ## look for races on a GPU in random programs (PROGRAMS=400 FIRST=0)
	MESHMUON_PROGRAMS=$(PROGRAMS) MESHMUON_FIRST_PROGRAM=$(FIRST) $(BIN)/python -m pytest -n 2 tests/happens_before/test_programs.py $(ARGS)

mutants: $(STAMP) ## break the package in one place at a time and count what the tests catch
	$(BIN)/python tests/mutation/run.py $(ARGS)

# In an environment of its own: the tests need none of Sphinx. Warnings are errors; then every link of the finished pages is followed.
DOCS_VENV  := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
SITE       := build/site

docs: $(DOCS_STAMP) ## build the site into build/site; warnings, broken links and missing docstrings fail
	@rm -rf $(SITE)
	$(DOCS_VENV)/bin/python -m sphinx --quiet --fail-on-warning --fresh-env -c docs/site -d build/site-cache $(ARGS) . $(SITE)
	$(DOCS_VENV)/bin/python docs/site/check.py $(SITE)

$(DOCS_STAMP): pyproject.toml constraints.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@rm -f $(DOCS_VENV)/.installed-* && touch $@

# The wheel is tried where neither the clone nor anything but torch can be imported.
PACKAGE_VENV  := .venv-package
PACKAGE_STAMP := $(PACKAGE_VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

package: $(PACKAGE_STAMP) ## build sdist and wheel into dist/, check them, and try the wheel in an empty environment
	@rm -rf dist
	$(PACKAGE_VENV)/bin/python -m build --outdir dist .
	$(PACKAGE_VENV)/bin/python -m twine check --strict dist/*
	$(PACKAGE_VENV)/bin/python release/contents.py dist
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv $$folder/empty; \
	$$folder/empty/bin/python -m pip install --quiet --constraint constraints.txt torch; \
	$$folder/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl; \
	cp release/smoke.py $$folder; cd $$folder; env -u PYTHONPATH empty/bin/python smoke.py

$(PACKAGE_STAMP): pyproject.toml constraints.txt
	@test -x $(PACKAGE_VENV)/bin/python || $(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt 'build>=1.2' 'twine>=6'
	@rm -f $(PACKAGE_VENV)/.installed-* && touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-models .venv-trainers .venv-docs .venv-package .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(MODELS_STAMP): pyproject.toml constraints.txt
	@test -x $(MODELS_VENV)/bin/python || $(PYTHON) -m venv $(MODELS_VENV)
	$(MODELS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(MODELS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,models,vision]'
	@rm -f $(MODELS_VENV)/.installed-* && touch $@

$(TRAINERS_STAMP): pyproject.toml constraints.txt
	@test -x $(TRAINERS_VENV)/bin/python || $(PYTHON) -m venv $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(TRAINERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' 'ray[train]==2.60.0'
	@rm -f $(TRAINERS_VENV)/.installed-* && touch $@

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("meshmuon needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,trainers,models]'
	@rm -f $(VENV)/.installed-* && touch $@
