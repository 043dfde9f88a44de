# One command for each task. `make demo` and `make test` do all set-up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The official SDKs that `make test` runs unmodified, each in a cached environment of its own.
SDKS := 0.36.0 0.4.1

.PHONY: help setup demo test matrix fuzz cookbook defects faults chaos soak check format bench proto clean

help:
	@echo "make setup   a .venv with everything (idempotent)"
	@echo "make demo    fine-tune the embedded model and see it change"
	@echo "make test    the whole test suite"
	@echo "make matrix  thirteen official SDKs against one server; writes docs/reference/sdk-matrix.md"
	@echo "make fuzz    50,000 mutated bodies, 1,000 hostile losses, and more"
	@echo "make cookbook  recipes of the official cookbook, with the official SDK and with tinkex; writes docs/reference/cookbook.md"
	@echo "make defects  the official client's defects, tried on both clients; writes docs/reference/defects.md"
	@echo "make faults  2,000 steps and 5,000 samples over a network that fails all the time; writes docs/reference/faults.md"
	@echo "make chaos   a hundred kill -9 of the server under running clients"
	@echo "make soak    twenty minutes of mixed tenants: memory and descriptors stay flat"
	@echo "make check   lint, format, types, and known vulnerabilities of what is pinned"
	@echo "make bench   benchmarks; reports go to benchmarks/results"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tinkex needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (a minute or two; torch is large) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt pip
	@$(BIN)/pip install --quiet -c constraints.txt --group dev --editable '.[all]'
	@touch $@

demo: setup
	@$(BIN)/tinkex demo

# Two at a time: many tests wait for processes to start. Files stay whole, for their shared servers.
# The environments of the official SDKs live in the user's cache, so a fresh clone finds them again.
test: setup
	@$(BIN)/python tests/system_packages.py
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python -m pytest -n 2 --dist loadfile

matrix: setup
	@$(BIN)/python tests/together/matrix.py

fuzz: setup
	@$(BIN)/python tests/fuzz/fuzzing.py

cookbook: setup
	@$(BIN)/python tests/cookbook/recipes.py

defects: setup
	@$(BIN)/python tests/defects/table.py

faults: setup
	@$(BIN)/python tests/faults/run.py

chaos: setup
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python tests/chaos/run.py
	@TINKEX_PROPERTY_EXAMPLES=300 $(BIN)/python -m pytest tests/server/store/test_stateful.py

soak: setup
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@$(BIN)/python tests/soak/soak.py

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/pyright -p tests/typing/pyrightconfig.json --pythonpath $(BIN)/python
	@$(BIN)/python tests/audit.py

format: setup
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: setup
	@$(BIN)/python tests/sdk_envs.py $(SDKS)
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

# Only after an edit of a .proto file. protoc 31 (grpcio-tools 1.75) makes code for protobuf 6 and 7;
# mypy-protobuf's stubs pass strict checks, protoc's own do not.
proto:
	@$(PYTHON) -m venv .cache/protoc
	@.cache/protoc/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.75.1 mypy-protobuf==5.1.0
	@PATH=$(CURDIR)/.cache/protoc/bin:$$PATH .cache/protoc/bin/python -m grpc_tools.protoc -I src \
	  --python_out=src --mypy_out=src src/tinkex/wire/proto/*.proto

clean:
	rm -rf $(VENV) demo-output .mypy_cache .ruff_cache .pytest_cache
