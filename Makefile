# Everything from a clone: `make demo`, `make check`, `make test`, `make test-long`. Stamps in .stamps/ make second runs start in seconds.
#
#   TORCH_ARGS   pip arguments for torch, for instance an index of CPU builds
#   PYTEST_ARGS  arguments for pytest
#   PYTEST_WORKERS  processes that share the tests; many tests wait more than they compute, so one more than two cores
#   SKIP_REDIS=1 skip the tests that need redis-server instead of failing them
#   HOURS, SEED  of make marathon
#   ISA          of make bench-peers: the tier that llama.cpp is built for (default: all that this machine has)

PYTHON ?= python3
TORCH_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 3
HOURS ?= 0.5
ISA ?=

VENV := .venv
PROTOC_VENV := .venv-protoc
PEERS_VENV := .venv-peers$(if $(ISA),-$(ISA))
NIXL_VENV := .venv-nixl
LOAD_VENV := .venv-load
STAMPS := .stamps
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
NODE_CLIENT := tests/clients/node
NODE_CHECKS := .ci/node
BUF := $(NODE_CHECKS)/node_modules/.bin/buf

.PHONY: setup demo check docs chart test test-compose test-nixl test-long test-aarch64 test-faults marathon fault-report bench-peers protos contract clean
.DELETE_ON_ERROR:

setup: $(STAMPS)/install

demo: $(STAMPS)/serve
	$(PY) -m baton.cli.cluster.demo

# What needs no running: format, lint, types of the core words, the rules of the architecture, and the pages.
check: setup $(STAMPS)/buf
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/basedpyright
	$(BUF) lint protos
	$(BUF) breaking protos --against protos/contract.binpb
	$(PY) -m pytest --quiet --no-header -p no:cacheprovider tests/test_architecture.py tests/test_docs.py
	$(MAKE) --no-print-directory docs

# The pages of docs/ and the reference, as a site in build/site; a link that leads nowhere ends it.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

# Tests see no GPU, whose memory two workers of a stack would fight for; `pytest -m gpu` runs what needs one. Compiled
# modules are kept: without them the collection took each process 27 s of CPU instead of 17, and a worker's start 0.3 s more.
# Threads of one sum that wait for each other sleep, as in workers: while they spun, 32 tests of two threads took 44 s of CPU
# instead of 14 on two cores that others had too.
test: setup $(STAMPS)/protoc $(STAMPS)/buf $(STAMPS)/helm system-packages node-packages
	PYTHONDONTWRITEBYTECODE= $(TESTS_ENV) $(PY) -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

# A process that is lost to a signal says where it was, and one that stands still for ten minutes too. The first part is shared
# by processes as `test` is; what needs the machine for itself follows, one by one. A part of which PYTEST_ARGS choose nothing
# ends with 5.
test-long: setup long-packages $(STAMPS)/load
	status=0; \
	$(LONG_TESTS) -m "long and not alone" $(IN_PARALLEL) $(PYTEST_ARGS) || test $$? = 5 || status=1; \
	$(LONG_TESTS) -m "long and alone" $(PYTEST_ARGS) || test $$? = 5 || status=1; \
	exit $$status

# Files are taken in the order of tests/conftest.py.
IN_PARALLEL = -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

TESTS_ENV = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-passive}
LONG_TESTS = $(TESTS_ENV) PYTHONFAULTHANDLER=1 $(PY) -m pytest --timeout 2700 -o faulthandler_timeout=600

# The kernels for 64 bit Arm, cross-compiled and run by an emulator on the calls that this machine's kernels were given.
test-aarch64: setup long-packages
	OMP_NUM_THREADS=1 $(PY) -m pytest -m long --timeout 900 tests/engine/native/test_aarch64.py $(PYTEST_ARGS)

# Faults beyond those of every landing (P1); what test and test-long run of tests/faults is not repeated.
test-faults: setup system-packages
	$(TESTS_ENV) $(PY) -m pytest -m faults --timeout 900 tests/faults $(PYTEST_ARGS)

# Load, bursts, cancels and faults for hours, and what grew meanwhile; a line in bench/results/.
marathon: setup system-packages
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m tests.faults.marathon --hours $(HOURS) $(if $(SEED),--seed $(SEED))

# Totals of all runs that left a line there: marathons, and `python -m tests.faults.gather kills|rolls|digests|nemesis|fuzz|world|stack|builds COUNT`.
fault-report: setup
	@$(PY) -m tests.faults.record

# The images by deploy/Dockerfile on a base of Debian's packages, and compose.yaml's CPU profile in containers. As root on
# Debian; about 12 GB in BATON_CONTAINERS (/var/tmp/baton-containers), which later runs find again.
test-compose: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -m containers tests/containers $(PYTEST_ARGS)

# The transport suite over NIXL, on host memory; UCX keeps to this machine.
test-nixl: setup $(STAMPS)/nixl
	UCX_TLS=tcp,cma,self UCX_NET_DEVICES=lo OMP_NUM_THREADS=1 $(NIXL_VENV)/bin/python -m pytest \
		tests/kvtransfer/transports/test_transports*.py -k nixl --show-capture=no $(PYTEST_ARGS)

# What bench/cpu.py measures against, apart from everything else: OpenVINO, and llama.cpp built for this machine, or for a
# tier that BATON_ISA caps ours at (about 10 minutes).
bench-peers: $(STAMPS)/peers$(if $(ISA),-$(ISA))

protos: $(STAMPS)/protoc
	$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. \
		protos/baton/v1/*.proto

# The contract as it is released: what `make check` holds every change against. Run it at a release.
contract: $(STAMPS)/buf
	$(BUF) build protos --exclude-source-info --output protos/contract.binpb

# Wheels in dist/: with the kernels of every tier of this machine's architecture, for machines without a compiler, and of the
# client alone. For another architecture:
# make wheel MACHINE=aarch64 CXX=aarch64-linux-gnu-g++
MACHINE ?= $(shell uname -m)
wheel: setup
	BATON_WHEEL_FOR=$(MACHINE) CXX=$(CXX) $(PIP) wheel --no-deps --wheel-dir dist .
	$(PIP) wheel --no-deps --wheel-dir dist ./clients/python

# The chart as one file in dist/, with the rules and dashboards that its folder links to.
chart: $(STAMPS)/helm
	$(VENV)/bin/helm package deploy/helm --destination dist

clean:
	rm -rf $(VENV) $(PROTOC_VENV) $(NIXL_VENV) $(LOAD_VENV) .venv-peers* $(STAMPS) *.egg-info build clients/python/build dist $(NODE_CLIENT)/node_modules $(NODE_CHECKS)/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS):
	@mkdir -p $@

$(STAMPS)/venv: | $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is not there, or older than Python 3.11" >&2; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "install python3-venv" >&2; exit 2; }
	@touch $@

# torch first and alone, so that TORCH_ARGS (an index of its own) touches nothing else.
$(STAMPS)/torch: $(STAMPS)/venv
	@echo "installing torch"
	@$(PIP) install $(TORCH_ARGS) 'torch>=2.11,<2.14'
	@touch $@

# What serving needs comes first and alone: 20 s instead of 2 minutes until `make demo` answers.
$(STAMPS)/serve: pyproject.toml $(STAMPS)/torch
	@echo "installing baton"
	@$(PIP) install --editable .
	@touch $@

$(STAMPS)/install: pyproject.toml $(STAMPS)/serve
	@echo "installing what the checks and tests need"
	@$(PIP) install --editable '.[test]'
	@touch $@

# The code generator needs an older protobuf than the runtime: it lives apart.
$(STAMPS)/protoc: | $(STAMPS)/venv
	@echo "installing the code generator"
	@test -x $(PROTOC_VENV)/bin/python || $(PYTHON) -m venv $(PROTOC_VENV)
	@$(PROTOC_VENV)/bin/python -m pip --disable-pip-version-check --quiet install 'grpcio-tools==1.71.2' 'setuptools<81'
	@touch $@

# Let an environment see the packages of the first.
SEE_FIRST = $(PY) -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	> $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/baton.pth

# Its wheels ask for a torch of their own choice; here they take that of the first environment, like everything else.
$(STAMPS)/nixl: $(STAMPS)/install
	@echo "installing NIXL"
	@test -x $(NIXL_VENV)/bin/python || $(PYTHON) -m venv $(NIXL_VENV)
	@$(NIXL_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps 'nixl-cu12>=1.5,<2'
	@$(call SEE_FIRST,$(NIXL_VENV))
	@touch $@

# Load generators that drive the HTTP API in a test, with the torch of the first environment.
$(STAMPS)/load: $(STAMPS)/install
	@echo "installing load generators"
	@test -x $(LOAD_VENV)/bin/python || $(PYTHON) -m venv $(LOAD_VENV)
	@$(call SEE_FIRST,$(LOAD_VENV))
	@$(LOAD_VENV)/bin/python -m pip --disable-pip-version-check --quiet install 'aiperf==0.13.0' 'guidellm==0.8.1'
	@touch $@

# Without NATIVE llama.cpp takes AVX2, FMA, F16C and BMI2. pip would keep a build for the next tier.
LLAMA_FLAGS = $(if $(ISA),-DGGML_NATIVE=OFF $(if $(filter x86-64-v4 avx512-vnni,$(ISA)),-DGGML_AVX512=ON) \
	$(if $(filter avx512-vnni,$(ISA)),-DGGML_AVX512_VNNI=ON),-DGGML_NATIVE=ON)
$(STAMPS)/peers$(if $(ISA),-$(ISA)): | $(STAMPS)/venv
	@echo "building llama.cpp"
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@CMAKE_ARGS="$(LLAMA_FLAGS)" $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-cache-dir \
		'llama-cpp-python==0.3.36' 'gguf>=0.17,<1'
	@echo "installing OpenVINO"
	@$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install 'openvino-genai>=2026.4,<2027'
	@touch $@

# The tests of deploy/helm render with it.
$(STAMPS)/helm: .ci/helm | $(STAMPS)/venv
	@echo "installing helm"
	@$(PY) .ci/helm $(VENV)/bin
	@touch $@

.PHONY: system-packages long-packages node-packages
system-packages:
	@.ci/system-packages

long-packages:
	@.ci/system-packages long

node-packages: $(STAMPS)/node

$(STAMPS)/node: $(wildcard $(NODE_CLIENT)/package.json $(NODE_CLIENT)/package-lock.json) | $(STAMPS) system-packages
	@if test -f $(NODE_CLIENT)/package.json && command -v npm >/dev/null; then \
		echo "installing the Node client's packages"; \
		cd $(NODE_CLIENT) && if test -f package-lock.json; then npm ci --silent; else npm install --silent; fi; \
	fi
	@touch $@

# Not `npm ci`, which asks for the binaries of all systems; with the lock file's checksums all the same.
$(STAMPS)/buf: $(NODE_CHECKS)/package.json $(NODE_CHECKS)/package-lock.json | $(STAMPS) system-packages
	@command -v npm >/dev/null || { echo "install npm: buf, which checks protos/, is one of its packages" >&2; exit 2; }
	@echo "installing buf"
	@cd $(NODE_CHECKS) && npm install --no-save --silent
	@touch $@
