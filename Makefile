# make serve   set up and serve a small model on http://127.0.0.1:8000
# make test    set up, run every check and the tests
# make setup   only make .venv        make check   only the checks        make nightly   the long tests
# make test-vllm   the plugin's tests in vLLM itself, in an environment of their own, .venv-vllm
#
# PYTHON names the interpreter to build .venv from (3.11 or newer). MODEL is what `make serve` serves.

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
MODEL ?=
SERVE_ARGS ?=
PYTEST_ARGS ?=
TEST_WORKERS ?= 2

STAMP := $(VENV)/.k3hal-setup
export PYTHON

# As many processes of one thread each as there are workers: threads of several processes would wait for each other.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: setup serve test check nightly test-vllm
.DEFAULT_GOAL := setup

setup: $(STAMP)

# Set up again only when what is installed may have changed; sources are used in place.
$(STAMP): pyproject.toml constraints/cpu.txt ci/setup
	ci/setup $(VENV)
	@touch $@

serve: $(STAMP)
	$(VENV)/bin/k3hal serve $(MODEL) $(SERVE_ARGS)

check: $(STAMP)
	ci/check $(VENV)/bin

test: check
	$(TEST_ENV) $(VENV)/bin/python -m pytest -m "not nightly and not device" -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

nightly: $(STAMP)
	EXTRAS=dev,browser ci/setup $(VENV)
	ci/nightly $(VENV)/bin
	ci/test-vllm $(VLLM_VENV)

test-vllm:
	ci/test-vllm $(VLLM_VENV)
