# Everything runs in .venv, which is made and filled on first use, and again when pyproject.toml changes.
#
#   make demo    the main job on real input, under a minute once installed
#   make test    the tests, JOBS=2 files at a time, each with a Ray of its own; JOBS=0: in one process, as for a debugger
#   make test-full   every backend, operation, dtype, world size, size, root and place; tests marked `full` (an hour)
#   make real-cupy   the fake of cupy and the backend nccl against the real cupy 13 and 14, and NCCL (no GPU)
#   make test-vllm   raycollect.vllm in the real engine of vLLM, on the CPU, in .venv-vllm (Python 3.11; 4 GB)
#   make test-verl   raycollect.verl in the real verl, on the CPU, in .venv-verl (Python 3.10 to 3.12; 1.5 GB)
#   make test-hosts   all tests of groups over several hosts, in network namespaces: as root (5 minutes)
#   make hosts   a Ray cluster on such hosts, for as long as ARGS="-- COMMAND ..." runs there; by default a shell
#   make lint    ruff, mypy, import-linter
#   make soak    a thousand groups come and go and a hundred actors are killed: does anything grow? (about 20 minutes)
#   make bench   raycollect beside gloo, MPI and what Ray has, claim by claim; ARGS=--quick for less
#   make docs    the documentation as a site, in site/
#   make wheel   sdist and wheel, tried on each Python that is found
#   make release-check, release-tag, release-upload   see "A release" in CONTRIBUTING.md
#   make clean   removes the environments and caches

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2
# Files in the order given. Those without Ray come first: they need not run in a process that has it, and nothing that
# computes much runs beside Ray's workers, whose priority is low. Those of faults, which take longest, are not left to the
# end. Those of hosts come alone: they count what links carry, and beside others a broadcast has sent twice of it.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # each of some hundred processes would compile the package anew

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SECONDARY:
.PHONY: help demo test test-full test-hosts test-verl test-vllm hosts real-cupy soak lint bench docs wheel release-check release-tag release-upload clean install-%

help:
	@sed -n '3,17s/^# *//p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/digits.py $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) $(or $(ARGS),tests/pure tests/gpu tests/faults tests/contract tests/ray)
	$(if $(ARGS),,$(BIN)/python -m pytest tests/hosts)

test-full: $(VENV)/.installed-test-full
	$(BIN)/python -m pytest -m "full or not full" tests/full $(ARGS)
	$(PYTEST) -m full tests/pure tests/faults tests/contract tests/ray

real-cupy:
	PYTHON=$(PYTHON) bash tests/real_cupy.sh $(ARGS)

test-vllm:
	PYTHON=$(PYTHON) bash tests/vllm.sh $(ARGS)

test-verl:
	PYTHON=$(PYTHON) bash tests/verl.sh $(ARGS)

test-hosts: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "full or not full" tests/hosts $(ARGS)

hosts: $(VENV)/.installed-test
	$(BIN)/python -m tests.hosts $(ARGS)

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.faults.soak --write $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python docs/results.py --write

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

wheel:
	bash tests/wheel.sh $(ARGS)

release-check:
	$(PYTHON) .ci/release.py check
	RELEASE=1 .ci/run
	$(MAKE) test-full soak

release-tag:
	$(PYTHON) .ci/release.py tag

release-upload: $(VENV)/.created
	$(PYTHON) .ci/release.py upload
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python -m twine upload $(ARGS) dist/raycollect-*

install-%: $(VENV)/.installed-% ;

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "raycollect needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "installing raycollect[$*] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf .venv .venv310 .venv-cupy13* .venv-cupy14* .venv-verl* .venv-vllm* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
