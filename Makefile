# make train   set up and train the digits CNN at O2
# make test    set up and run the tests
# The first of them makes a virtual environment in .venv; PYTHON chooses its interpreter (3.10 to 3.13). What needs other
# environments, or hours, is a session of noxfile.py.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
CXX_SOURCES := $(filter %.h %.cpp %.inl %.cu %.cuh,$(shell find csrc -type f))

WORKERS ?= 2
PYTEST_ARGS ?=
# of lint: FIX=1 applies what it would report
FIX ?=
# of bench: which, and QUICK=--quick to see that they run
BENCHMARKS ?= step ops levels overhead compiled distributed sharding fidelity
QUICK ?=
# of gpu-check: one stage or all, the seconds for each, and DRY=1 to see the commands alone
STAGE ?= all
BUDGET ?= 530
DRY ?=

.PHONY: help train test ops lint type docs bench gpu-check clean

help:
	@echo 'make train   set up, train the digits CNN at O2, end with its accuracy'
	@echo 'make test    set up, try every behaviour once (PYTEST_ARGS="-k name" for some of the tests)'
	@echo 'make ops     build the compiled ops (FORCE_CUDA=1, TORCH_CUDA_ARCH_LIST=, MAX_JOBS=, AMP_WRAPPER_WITH_OPS=0)'
	@echo 'make lint    ruff and clang-format (FIX=1 applies them)'
	@echo 'make type    mypy'
	@echo 'make docs    build the pages into site/'
	@echo 'make bench   measure, and print the tables (BENCHMARKS="step ops", QUICK=--quick)'
	@echo 'make gpu-check   everything that needs a GPU (STAGE=ops|step|engine|end-to-end|sanitizer|ddp, BUDGET= seconds, DRY=1)'
	@echo 'make clean   remove the environments and everything built'
	@echo '$(BIN)/nox --list   other versions, other projects, and hours of tests before a release'

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
	sys.exit(0 if ok else "Python 3.10 to 3.13 is needed, but $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo 'The venv module is missing. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo '== making the virtual environment $(VENV)'
	$(PYTHON) -m venv $(VENV)

# pip first, since older ones know no groups. The package comes last, without isolation: its build sees the torch it will run with
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt setup.py
	@echo '== installing torch, mmengine, mmcv-lite, the tools, and amp_wrapper'
	$(PIP) pip
	$(PIP) --group runtime --group dev --group docs
	$(PIP) --no-deps --group openmmlab
	AMP_WRAPPER_WITH_OPS=0 $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# apart from the installation, which compiles all files each time; other values of FORCE_CUDA and the like than at the last build
# are not seen here: make ops builds in any case
$(VENV)/.ops: $(VENV)/.installed amp_wrapper/ops/building.py $(CXX_SOURCES)
	@echo '== building the compiled ops'
	@$(BIN)/python setup.py build_ext --inplace > $(VENV)/ops.log || { cat $(VENV)/ops.log >&2; exit 1; }
	@touch $@

train: $(VENV)/.ops
	$(BIN)/python tools/train.py configs/digits/cnn_o2.py

test: $(VENV)/.ops
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

ops:
	@rm -f $(VENV)/.ops
	@$(MAKE) --no-print-directory $(VENV)/.ops
	@$(BIN)/python -m amp_wrapper info

lint: $(VENV)/.installed
	$(BIN)/ruff check $(if $(FIX),--fix) .
	$(BIN)/ruff format $(if $(FIX),,--check) .
	$(BIN)/clang-format $(if $(FIX),-i,--dry-run -Werror) $(CXX_SOURCES)

type: $(VENV)/.installed
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/mkdocs build --strict --site-dir site

bench: $(VENV)/.ops
	set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(QUICK); done

# what is installed decides what is run: an image for GPUs has a torch of its own, and no way to install another
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check --stage $(STAGE) --budget $(BUDGET) $(if $(DRY),--dry)

clean:
	rm -rf amp_wrapper/ops/*.so $(VENV) .nox build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
