# make train   set up and train the digits CNN at O2
# make test    set up and run the tests
# The first of them makes a virtual environment in .venv; PYTHON chooses its interpreter (3.10 to 3.13).
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
PYTEST_ARGS ?=
# the environment of test-downstream, and its mmcv: full, or mmcv-lite==2.1.0 (only mmpretrain is tried then). A wheel that
# lies in WHEELS is taken; otherwise mmcv is built from source, which takes up to 40 minutes
DOWNSTREAM ?= .venv-downstream
MMCV ?= mmcv==2.1.0
WHEELS ?= ../shared/wheels
# the torch of test-torch, its mmengine (mmengine, or onedl: the fork, with its mmcv), and the environment
TORCH ?= 2.15.0
ENGINE ?= mmengine
VENV_TORCH ?= .venv-torch-$(TORCH)$(if $(filter onedl,$(ENGINE)),-onedl)
PINNED_TORCH := $(shell sed -n 's/^torch==//p' requirements/runtime.txt)
# of matrix: PYTHON/TORCH/ENGINE of each cell
CELLS ?= $(foreach engine,mmengine onedl,$(foreach torch,2.6.0 2.9.1 2.11.0 2.13.0 2.14.1 2.15.0,$(foreach python,3.10 3.11 3.12 3.13,$(python)/$(torch)/$(engine))))
# the environment of test-foreign
FOREIGN ?= .venv-foreign

# how often crash-test kills each kind of training at each level, how many files fuzz-test damages at each of four levels; SEED
# chooses the moments and the damage
KILLS ?= 8
FILES ?= 2500
SEED ?= 0

# of gpu-check: one stage or all, the seconds for each, and DRY=1 to see the commands alone
STAGE ?= all
BUDGET ?= 530
DRY ?=
# of bench: which, and QUICK=--quick to see that they run
BENCHMARKS ?= step ops levels overhead compiled distributed sharding fidelity
QUICK ?=

CXX_SOURCES := $(filter %.h %.cpp %.inl %.cu %.cuh,$(shell find csrc -type f))

.PHONY: help gpu-check ops train test test-all test-torch test-onedl matrix test-downstream test-foreign crash-test fuzz-test lint format type docs bench clean

help:
	@echo 'make train   set up, train the digits CNN at O2, end with its accuracy'
	@echo 'make test    set up, try every behaviour once (PYTEST_ARGS="-k name" for some of the tests)'
	@echo 'make test-all  every combination, long runs, and planted faults that the tests must notice: hours, before a release'
	@echo 'make test-torch  the tests on another torch, in an environment of its own (TORCH=2.15.0, or newest); several GB'
	@echo 'make test-onedl  the tests on onedl-mmengine and onedl-mmcv, in an environment of their own'
	@echo 'make matrix  the tests on every torch, Python and mmengine of benchmarks/results/versions.md (CELLS="3.11/2.15.0/mmengine 3.12/2.6.0/onedl")'
	@echo 'make test-downstream   an environment of its own, models of mmpretrain, mmsegmentation, mmdetection and timm'
	@echo 'make test-foreign  an environment of its own, optimizers, averages and models of other packages against plain FP32'
	@echo 'make crash-test  kill about 200 trainings with SIGKILL and compare what becomes of them (KILLS=, SEED=)'
	@echo 'make fuzz-test   resume from 10,000 damaged checkpoints (FILES=, SEED=)'
	@echo 'make ops     build the compiled ops (FORCE_CUDA=1, TORCH_CUDA_ARCH_LIST=, MAX_JOBS=, AMP_WRAPPER_WITH_OPS=0)'
	@echo 'make lint    ruff, clang-format; make format applies them'
	@echo 'make type    mypy'
	@echo 'make docs    build the pages into site/'
	@echo 'make gpu-check   everything that needs a GPU (STAGE=ops|step|engine|end-to-end|sanitizer|ddp, BUDGET= seconds, DRY=1)'
	@echo 'make bench   measure, and print the tables (BENCHMARKS="step ops", QUICK=--quick)'
	@echo 'make clean   remove the environments and everything built'

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
	sys.exit(0 if ok else "Python 3.10 to 3.13 is needed, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo 'The venv module is missing. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo '== making the virtual environment $(VENV)'
	$(PYTHON) -m venv $(VENV)

# setuptools first: the package is built without isolation, so that a build sees the torch it will run with
$(VENV)/.runtime: $(VENV)/pyvenv.cfg requirements/build.txt requirements/runtime.txt requirements/openmmlab.txt \
		requirements/constraints.txt pyproject.toml setup.py
	@echo '== installing torch, mmengine, mmcv-lite and what they need (pinned in requirements/)'
	$(PIP) install --quiet -r requirements/build.txt
	$(PIP) install --quiet -r requirements/runtime.txt
	$(PIP) install --quiet --no-deps -r requirements/openmmlab.txt
	@echo '== installing amp_wrapper'
	AMP_WRAPPER_WITH_OPS=0 $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

# the ops apart from the installation, which hides what a compiler says, and again where csrc/ changed. Other values of
# FORCE_CUDA and the like than at the last build are not seen here: make ops builds in any case
build_ops = @echo '== building the compiled ops'; \
	$(BIN)/python setup.py build_ext --inplace > $(VENV)/ops.log || { cat $(VENV)/ops.log >&2; exit 1; }

$(VENV)/.ops: $(VENV)/.runtime setup.py amp_wrapper/ops/building.py $(CXX_SOURCES)
	$(build_ops)
	@touch $@

ops: $(VENV)/.runtime
	$(build_ops)
	@touch $(VENV)/.ops
	@$(BIN)/python -m amp_wrapper info

# the ops stand after the bar: they are brought up to date, but are no reason to install anything again
$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt | $(VENV)/.ops
	@echo '== installing the test tools'
	$(PIP) install --quiet -r requirements/dev.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.dev requirements/docs.txt
	@echo '== installing the tools of the documentation'
	$(PIP) install --quiet -r requirements/docs.txt
	@touch $@

train: $(VENV)/.ops
	$(BIN)/python tools/train.py configs/digits/cnn_o2.py

TRY = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: $(VENV)/.dev
	$(TRY) $(PYTEST_ARGS)

test-all: $(VENV)/.dev
	$(TRY) --full $(PYTEST_ARGS)
	$(BIN)/python tests/system/planted_faults.py

# everything is pinned but torch, and what that torch asks for in a version of its own
PIP_TORCH = $(VENV_TORCH)/bin/python -m pip --disable-pip-version-check
$(VENV_TORCH)/.done-$(ENGINE): requirements/build.txt requirements/runtime.txt requirements/dev.txt requirements/openmmlab.txt \
		requirements/onedl.txt requirements/constraints.txt pyproject.toml setup.py
	$(MAKE) --no-print-directory VENV=$(VENV_TORCH) $(VENV_TORCH)/pyvenv.cfg
	@echo '== installing torch $(TORCH); off a GPU machine, too, PyPI has it with the libraries of CUDA'
	$(PIP_TORCH) install --quiet -r requirements/build.txt
	$(PIP_TORCH) install --quiet torch$(if $(filter-out newest,$(TORCH)),==$(TORCH))
	sed -e '/^sympy==/d' -e '/^setuptools==/d' requirements/constraints.txt > $(VENV_TORCH)/constraints.txt
	@# beside -c, so that what is listed is pinned, and torch stays
	sed -e '/^torch==/d' -e '/^-/d' requirements/runtime.txt requirements/dev.txt > $(VENV_TORCH)/packages.txt
	$(PIP_TORCH) install --quiet -c $(VENV_TORCH)/constraints.txt -r $(VENV_TORCH)/packages.txt
	@echo '== installing $(ENGINE)'
	$(PIP_TORCH) uninstall --quiet --yes mmengine mmcv-lite onedl-mmengine onedl-mmcv
	$(PIP_TORCH) install --quiet --no-deps -r requirements/$(if $(filter onedl,$(ENGINE)),onedl,openmmlab).txt
	AMP_WRAPPER_WITH_OPS=0 $(PIP_TORCH) install --quiet --no-build-isolation --no-deps -e .
	@rm -f $(VENV_TORCH)/.done-*
	@touch $@

# the name of a library says which torch it is for: that of $(VENV) stays beside it
test-torch: $(VENV_TORCH)/.done-$(ENGINE)
	$(VENV_TORCH)/bin/python setup.py build_ext --inplace > $(VENV_TORCH)/ops.log || { cat $(VENV_TORCH)/ops.log >&2; exit 1; }
	$(VENV_TORCH)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# the torch of everything else, and the fork
test-onedl:
	$(MAKE) --no-print-directory test-torch TORCH=$(PINNED_TORCH) ENGINE=onedl

# each cell is one test-torch, in an environment that is removed afterwards
matrix:
	@failed=; for cell in $(CELLS); do echo "== $$cell"; IFS=/ read -r python torch engine <<< "$$cell"; \
	$(MAKE) --no-print-directory test-torch PYTHON="python$$python" TORCH="$$torch" ENGINE="$$engine" VENV_TORCH=.venv-matrix \
	|| failed="$$failed $$cell"; rm -rf .venv-matrix; done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

crash-test: $(VENV)/.dev
	KILLS=$(KILLS) SEED=$(SEED) $(TRY) --full tests/system/test_crash.py

fuzz-test: $(VENV)/.dev
	FILES=$(FILES) SEED=$(SEED) $(TRY) --full tests/system/test_damaged_checkpoints.py

$(DOWNSTREAM)/.done-$(notdir $(MMCV)): requirements/build.txt requirements/runtime.txt requirements/dev.txt requirements/downstream.txt \
		requirements/downstream-runtime.txt requirements/constraints.txt pyproject.toml setup.py
	$(MAKE) --no-print-directory VENV=$(DOWNSTREAM) $(DOWNSTREAM)/.dev
	@echo '== installing $(MMCV) in place of mmcv-lite (from $(WHEELS), if it is there)'
	$(DOWNSTREAM)/bin/python -m pip uninstall --quiet --yes mmcv-lite mmcv
	$(DOWNSTREAM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
		$(if $(wildcard $(WHEELS)),--find-links $(WHEELS)) $(MMCV)
	@echo '== installing what the projects need, and mmpretrain, mmsegmentation, mmdetection, torchvision themselves'
	$(DOWNSTREAM)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/downstream-runtime.txt
	$(DOWNSTREAM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/downstream.txt
	@rm -f $(DOWNSTREAM)/.done-*
	@touch $@

test-downstream: $(DOWNSTREAM)/.done-$(notdir $(MMCV))
	$(MAKE) --no-print-directory VENV=$(DOWNSTREAM) $(DOWNSTREAM)/.ops
	$(DOWNSTREAM)/bin/python -m pytest tests/downstream -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

$(FOREIGN)/.done: requirements/build.txt requirements/runtime.txt requirements/dev.txt requirements/foreign.txt \
		requirements/foreign-runtime.txt requirements/constraints.txt requirements/constraints-foreign.txt pyproject.toml setup.py
	$(MAKE) --no-print-directory VENV=$(FOREIGN) $(FOREIGN)/.dev
	@echo '== installing $(MMCV) in place of mmcv-lite (from $(WHEELS), if it is there)'
	$(FOREIGN)/bin/python -m pip uninstall --quiet --yes mmcv-lite mmcv
	$(FOREIGN)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
		$(if $(wildcard $(WHEELS)),--find-links $(WHEELS)) $(MMCV)
	@echo '== installing the packages of requirements/foreign.txt, and what they need'
	$(FOREIGN)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/foreign-runtime.txt
	$(FOREIGN)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/foreign.txt
	@touch $@

test-foreign: $(FOREIGN)/.done
	$(MAKE) --no-print-directory VENV=$(FOREIGN) $(FOREIGN)/.ops
	$(FOREIGN)/bin/python -m pytest tests/foreign_packages -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

type: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --site-dir site

bench: $(VENV)/.ops
	set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(QUICK); done

# what is installed decides what is run: an image for GPUs has a torch of its own, and no way to install another
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check --stage $(STAGE) --budget $(BUDGET) $(if $(DRY),--dry)

clean:
	rm -rf amp_wrapper/ops/*.so
	rm -rf $(VENV) $(DOWNSTREAM) $(FOREIGN) .venv-onedl .venv-torch-* .venv-matrix build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
