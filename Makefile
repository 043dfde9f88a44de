# One command per task. `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed in .venv: enough for the demo and a server, or everything for development.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_DOCS := $(VENV)/.ready-docs

# The official SDKs that `make test` runs unmodified, each in its own cached environment.
SDKS := 0.36.0 0.4.1

# Of the random order of tests: the same in every clone of a commit, another for the next commit.
# 1 where there is no git. `make test SEED=7` runs another order.
SEED ?= $(shell echo $$((0x$$(git rev-parse HEAD 2>/dev/null | cut -c 1-7 | grep . || echo 1))))

.PHONY: help setup dev demo docs test matrix fuzz cookbook frameworks defects faults chaos cluster soak newcomer lowest gguf kernels image check dist format bench proto stub vendor clean

help:
	@echo "make setup     create .venv with the client, the server and the command line (safe to repeat)"
	@echo "make dev       add what tests and checks need; the commands below do it by themselves"
	@echo "make demo      fine-tune the embedded model and compare its samples"
	@echo "make docs      build the documentation as a site, in site/; it needs no network to be read"
	@echo "make test      run all tests"
	@echo "make check     lint, format, types, and known vulnerabilities of pinned packages"
	@echo "make format    fix lint and format"
	@echo "make dist      build the source distribution and, from it, the wheel, into dist"
	@echo "make bench     run all benchmarks; reports go to benchmarks/results"
	@echo "make matrix    run thirteen official SDKs against one server; writes docs/reference/sdk-matrix.md"
	@echo "make cookbook  run converters and recipes of the official cookbook with both clients; writes docs/reference/cookbook.md"
	@echo "make frameworks  run LangChain and llm, unmodified, against OpenAI's routes"
	@echo "make defects   test known defects of the official client with both clients; writes docs/reference/defects.md"
	@echo "make faults    2,000 steps and 5,000 samples on a faulty network; writes docs/reference/faults.md"
	@echo "make fuzz      50,000 mutated request bodies, 1,000 hostile custom losses, 2,000 hostile images, and more"
	@echo "make chaos     a hundred kills of server processes under running clients"
	@echo "make cluster   kills in a cluster of web and worker processes, behind nginx and on Ray"
	@echo "make soak      twenty minutes of mixed load; memory and descriptors must stay flat"
	@echo "make newcomer  a fresh clone, an empty home folder, and every command of README and quickstart"
	@echo "make lowest    the client's tests with the oldest releases of its dependencies that are allowed"
	@echo "make gguf      export models as GGUF and read them with llama.cpp, built from source"
	@echo "make kernels   run the GPU kernels on a CPU, in the interpreter of Triton; tens of minutes"
	@echo "make image     build the image of deploy/Dockerfile with buildah, as root, and run it"
	@echo "make proto     generate protobuf code from the .proto files"
	@echo "make stub      generate src/tinkex/__init__.pyi from the table of public names"
	@echo "make vendor    fetch the JavaScript libraries of the console from npm again"
	@echo "make clean     delete .venv and caches"

setup: $(READY)

dev: $(READY_DEV)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tinkex needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) qa/install.py $(VENV) 'tinkex, its server and torch' \
	  --editable '.[server,engine,cli]'
	@touch $@

$(READY_DEV): $(READY)
	@$(PYTHON) qa/install.py $(VENV) 'the tools for tests and checks' --group dev --editable '.[all]'
	@touch $@

demo: setup
	@$(BIN)/tinkex demo

# A warning is a failure. `make test` builds the site, too.
docs: $(READY_DOCS)
	@$(BIN)/python -m qa.docs_site

$(READY_DOCS): $(READY)
	@$(PYTHON) qa/install.py $(VENV) 'MkDocs' --group docs
	@touch $@

# Three workers on two cores, because many tests wait for processes. Each file runs in one worker,
# because its tests share servers; tests/conftest.py orders the files. The environments of the official
# SDKs are in the user's cache, so new clones reuse them. Python keeps compiled modules also where the
# machine turned that off: several hundred processes import tinkex.
test: export PYTHONDONTWRITEBYTECODE =
test: dev
	@$(BIN)/python tests/system_packages.py
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --randomly-seed $(SEED)

matrix: dev
	@$(BIN)/python -m qa.sdk_matrix.run

fuzz: dev
	@$(BIN)/python -m qa.fuzz.run

cookbook: dev
	@$(BIN)/python -m qa.cookbook.weights
	@$(BIN)/python -m qa.cookbook.run

frameworks: dev
	@$(BIN)/python -m qa.frameworks.run

defects: dev
	@$(BIN)/python -m qa.defects.run

faults: dev
	@$(BIN)/python -m qa.faults.run

chaos: dev
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python -m qa.chaos.run
	@TINKEX_PROPERTY_EXAMPLES=300 $(BIN)/python -m pytest tests/server/store/test_stateful.py

cluster: dev
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python -m qa.cluster.run
	@$(BIN)/python -m qa.cluster.run --faults 10 --forgetful
	@$(BIN)/python -m pytest -m cluster tests/together

soak: dev
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python -m qa.soak.run

newcomer: dev
	@$(BIN)/python -m qa.newcomer.run

lowest: dev
	@$(BIN)/python -m qa.lowest

gguf: dev
	@$(BIN)/python -m qa.gguf.run

# Triton comes with torch for GPUs only. A test of the interpreter takes up to some minutes.
kernels: dev
	@$(BIN)/pip install --quiet --disable-pip-version-check triton==3.9.0
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -m gpu -n 2 --dist loadfile --timeout 1800 \
	  tests/engine/test_gpu_kernels.py tests/engine/test_gpu_experts.py tests/engine/test_gpu_mixtures.py \
	  tests/engine/test_gpu_prefill.py tests/engine/test_gpu_recorded_steps.py

image: dev
	@$(BIN)/python -m qa.image.run

check: dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/pyright -p tests/typing/pyrightconfig.json --pythonpath $(BIN)/python
	@$(BIN)/python -m qa.audit

dist: dev
	@$(BIN)/python -m qa.dist

format: dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: dev
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

# Needed only after an edit of a .proto file. protoc 31 (grpcio-tools 1.75) generates code for protobuf 6
# and 7. The stubs of mypy-protobuf pass strict type checks; those of protoc do not.
proto:
	@$(PYTHON) -m venv .cache/protoc
	@.cache/protoc/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.75.1 mypy-protobuf==5.1.0
	@PATH=$(CURDIR)/.cache/protoc/bin:$$PATH .cache/protoc/bin/python -m grpc_tools.protoc -I src \
	  --python_out=src --mypy_out=src src/tinkex/wire/proto/*.proto

# Needed only after an edit of the table in src/tinkex/__init__.py.
stub: dev
	@$(BIN)/python -m qa.stub

# Needed only after an edit of the versions in qa/vendor_console.py.
vendor:
	@$(PYTHON) -m qa.vendor_console

clean:
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache
