# make setup | demo | test | check | bench     Everything runs in .venv, which each target makes first if need be.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Many interpreters start, in half the time where modules are compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# What of .ci/setup has been done: what a demo needs, and what developers need besides.
BASE := $(VENV)/.base
READY := $(VENV)/.ready
PEERS := .peers
TRIED := .tried

# The inspector's page: TypeScript, which npm bundles into one file.
WEB := compiler/inspect/page/web
MODULES := $(WEB)/node_modules/.package-lock.json
PAGE := compiler/inspect/page/page.html

.PHONY: help setup docs demo demo-hosts demo-ray test test-full test-ops chaos simulate check lint format format-check types imports bench bench-gpu bench-peers proto clean demo-rdma test-rdma try

help:
	@echo "make setup    a virtual environment in $(VENV), with torch, this package, editable, what tests and docs need, and the page"
	@echo "make demo     train a small GPT over four local workers, and compare it with plain PyTorch"
	@echo "make demo-hosts  the same on two hosts, network namespaces with TLS between them; needs root"
	@echo "make demo-ray    the same on a Ray cluster of two nodes"
	@echo "make demo-rdma   a short one over RDMA, in a virtual machine that has a software device; needs root and Debian"
	@echo "make test     run the tests; ARGS='-k name' passes arguments on to pytest, ARGS=--durations=50 shows the slowest"
	@echo "make test-full  the same with all cases of tests of which make test runs a sample (tests/sample.py)"
	@echo "make test-ops   play PyTorch's op database, and write benchmarks/results/ops.md; ARGS='fft' plays some entries"
	@echo "make chaos      train with hundreds of random faults, on one host and on two, and compare the bits at the end"
	@echo "make simulate   run a hundred thousand schedules of a simulated cluster; ARGS='--first 7 --count 1' runs one again"
	@echo "make test-rdma   run the tests of RDMA in that virtual machine"
	@echo "make check    lint, formatting, types and import rules; make format mends what can be mended"
	@echo "make proto    write the Python of the control plane's messages (runtime/control/monarch.proto) anew"
	@echo "make docs     build the site of docs/ in out/site, and check it"
	@echo "make bench    measure, and write benchmarks/results/<date>.md"
	@echo "make bench-gpu  measure kernels on this machine's GPU, with the torch and Triton of PYTHON"
	@echo "make try      try Monarch with another Python and torch, in $(TRIED): make try PYTHON=python3.13 TORCH=torch==2.12.1"
	@echo "make bench-peers  measure actors against torchmonarch and ray, each in a virtual environment in $(PEERS)"

setup: $(READY) $(PAGE)

# A stamp is older than the files from which its step was made where that step has to be done again.
$(BASE): pyproject.toml .ci/setup .ci/venv
	@bash .ci/setup "$(PYTHON)" "$(VENV)" "$(TORCH)"
	@touch $@

$(READY): pyproject.toml .ci/setup .ci/venv
	@bash .ci/setup "$(PYTHON)" "$(VENV)" "$(TORCH)" dev,docs
	@touch $(BASE) $@

$(MODULES): $(WEB)/package.json $(WEB)/package-lock.json
	@command -v npm >/dev/null || { echo "make setup: npm is needed for the inspector's page. On Debian: apt-get install nodejs npm" >&2; exit 1; }
	@cd $(WEB) && npm ci --silent --no-progress
	@touch $@

$(PAGE): $(MODULES) $(filter-out %/node_modules,$(wildcard $(WEB)/*))
	@cd $(WEB) && npm run --silent build

# A virtual environment of its own, made anew for another Python.
try:
	@rm -rf $(TRIED) && bash .ci/setup "$(PYTHON)" "$(TRIED)" "$(TORCH)"
	$(TRIED)/bin/python .ci/tried.py

# Threads that wait for each other spinning lose most of their time where something else runs on the machine.
demo: $(BASE)
	OMP_WAIT_POLICY=passive $(BIN)/python examples/train_gpt.py $(ARGS)

demo-hosts: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.hosts.demo $(ARGS)

demo-ray: setup
	OMP_WAIT_POLICY=passive $(BIN)/python examples/train_on_ray.py $(ARGS)

demo-rdma: $(READY)
	OMP_WAIT_POLICY=passive bash .ci/with-rdma $(BIN)/python -m tests.hosts.rdma_demo $(ARGS)

# Files of tests side by side, in order: the last ones leave their process changed (tests/conftest.py).
test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-full:
	$(MAKE) test ARGS="--full $(ARGS)"

test-ops: setup
	$(BIN)/python -m tests.ops $(ARGS)

chaos: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m tests.chaos $(ARGS)

simulate: setup
	$(BIN)/python -m tests.simulation $(ARGS)

test-rdma: $(READY)
	bash .ci/with-rdma $(BIN)/python -m pytest -p no:cacheprovider tests/runtime/transport -k verbs --full $(ARGS)

check: lint format-check types imports

lint: setup
	$(BIN)/ruff check .

format-check: setup
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy
	cd $(WEB) && npm run --silent types

imports: setup
	$(BIN)/lint-imports

# The site of docs/ (mkdocs.yml): --strict refuses a page that is not listed, and a link that leads nowhere.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "out/site/index.html; its search needs a server: python3 -m http.server -d out/site"

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# On a machine that has a GPU, with its own torch and Triton: nothing is installed.
bench-gpu:
	PYTHONPATH=.src $(PYTHON) -m benchmarks.gpu $(ARGS)

bench-peers: setup
	@bash .ci/peers "$(PYTHON)" "$(PEERS)" "$(TORCH)"
	$(BIN)/python -m benchmarks.peers $(PEERS) $(ARGS)

# Kept current by tests/runtime/control/test_proto.py.
proto: setup
	.ci/proto $(BIN)/python

clean:
	rm -rf $(VENV) $(PEERS) $(WEB)/node_modules $(PAGE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist out
