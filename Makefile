# `make figures` and `make test` set up everything they need. VENV=path uses another environment.

PYTHON  ?= python3
VENV    ?= .venv
CORES   ?= $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
TESTERS ?= $(CORES)
TORCH   ?= torch==2.13.0
WORLD   ?= tiny
export PATH := $(abspath $(VENV))/bin:$(PATH)
# pip would compile every module, half of its time. Python compiles those that are imported, and keeps them unless
# PYTHONDONTWRITEBYTECODE is set.
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
# glibc otherwise returns the memory of every forward pass to the system and asks for it again: a tenth of all time
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 2147483648

.PHONY: help setup gpu base figures figures-all record report sphinx docs quick test lint format clean

help:
	@echo "make setup     the environment in $(VENV); commands that need it make it"
	@echo "make figures   tables and figures of the tiny world, from nothing, into paper_figures/tiny"
	@echo "make figures-all   all objectives, methods and ablations at one seed; shares what figures has computed"
	@echo "make record    main methods and ablations over six base models; about 9 hours, resumes (HOURS=2: stops after two; ADD=1: keeps docs/record)"
	@echo "make base      trains the base models of the package again and compares their scores; 8 to 18 minutes on one core"
	@echo "make report    one HTML page of what has been rendered"
	@echo "make sphinx    adds what builds the site"
	@echo "make docs      the site of docs/, into build/docs/index.html"
	@echo "make gpu       adds what models that train in bf16 need"
	@echo "make quick     lint, and the tests of geometry, configuration and constraints"
	@echo "make test      lint, unit tests, and the workflow on its tiniest configuration"
	@echo "make lint      ruff, snakefmt, snakemake --lint, import contracts"
	@echo "make format    what ruff and snakefmt mend by themselves"
	@echo "make clean     removes what belongs to the world $(WORLD) alone (WORLD=name: to another)"

setup: $(VENV)/.installed

# torch first and by itself, so that a machine's own build of this version (CPU or CUDA) is taken if it has one. One pip
# installs one package at a time, so several share the list; the last adds what another system needs.
$(VENV)/.installed: pyproject.toml envs/requirements.lock
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	xargs -P $(CORES) -n 28 $(INSTALL) --no-deps < envs/requirements.lock
	$(INSTALL) --requirement envs/requirements.lock --editable '.[dev]'
	touch $@

base: setup
	$(VENV)/bin/python workflow/make_base.py

figures: setup
	$(VENV)/bin/python -m gripmoe.cli.fork_server \
	  snakemake --profile workflow/profiles/local --cores $(CORES) --config world=$(WORLD)
	@gripmoe summary --runs "$$(ls -t results/*/runs_$(WORLD).csv | head -n 1)"
	@echo "Figures and tables: paper_figures/$(WORLD). All runs, attacks and questions: paper_figures/$(WORLD)/explorer.html"

figures-all: setup
	$(MAKE) figures WORLD=tiny_all

record: setup
	$(VENV)/bin/python workflow/make_record.py --cores $(CORES) $(if $(HOURS),--hours $(HOURS)) $(if $(ADD),--add)

# One self-contained page of the tables and figures that are there.
report: setup
	snakemake --profile workflow/profiles/local --cores 1 --config world=$(WORLD) --report paper_figures/$(WORLD)/report.html

sphinx: setup
	$(INSTALL) --requirement envs/docs.lock

# Warnings are errors, so a link to a page or heading that is not there fails.
docs: sphinx
	sphinx-build --quiet --fresh-env --fail-on-warning --builder html docs build/docs
	@echo "The site: build/docs/index.html"

gpu: setup
	$(INSTALL) --requirement envs/gpu.lock

quick: lint
	pytest -q -n $(CORES) tests/geometry tests/config tests/constraints

test: gpu lint
	$(INSTALL) --requirement envs/test.lock
	pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

lint: setup
	ruff check . && ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint
	lint-imports

format: setup
	ruff check --fix . ; ruff format . ; snakefmt Snakefile workflow

# Runs that another world names too stay. Without --remove the command lists what it would remove.
clean: setup
	gripmoe clean --world "$(WORLD)" --remove
