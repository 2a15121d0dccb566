# The same targets serve people and CI. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.installed-light
BENCH := $(VENV)/.installed-bench
FUZZ := $(VENV)/.installed-fuzz
MUTATION := $(VENV)/.installed-mutation
PINS = $(VENV)/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'

.PHONY: help install run demo test check bench profile generate lock crash regtest regtest-demo regtest-soak browser screenshots
.PHONY: cluster simulate mutants mutation fuzz container spectral alerts conformance clients clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rpcsvc needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev,onchain,otel,postgres,top,tor]'
	@touch $(LIGHT) $@

# The program alone: a sandbox needs no more.
$(LIGHT): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# The libraries that the benchmark compares with, needed by nothing else.
$(BENCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

# Operators for `make mutation`, needed by nothing else.
$(MUTATION): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[mutation]'
	@touch $@

# Coverage for `make fuzz`, needed by nothing else.
$(FUZZ): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[fuzz]'
	@touch $@

install: $(STAMP) ## make .venv with everything that the other targets need

run: $(LIGHT) ## serve on 127.0.0.1:8080 with the sandbox engine
	$(BIN)/rpcsvc serve

demo: $(LIGHT) ## run a whole swap each way and print every step
	$(BIN)/rpcsvc demo

# Without bytecode each worker would rewrite the asserts of all test files at every run. Files are
# begun as they are listed: sorted by the number of tests, the slow ones of e2e would come last.
test: export PYTHONDONTWRITEBYTECODE =
# Folders of tests are in memory where it has room: files would cost a fourth of the CPU.
test: export PYTEST_DEBUG_TEMPROOT = $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 1000000 {print "/dev/shm"}')
test: install ## the quick tests
	$(BIN)/python -m pytest -m 'not slow' --ignore tests/regtest --ignore tests/browser --ignore tests/container --ignore tests/e2e/test_cluster.py -n 3 --dist loadfile --no-loadscope-reorder -rs

# They wait for restarts for a third of their time: more of them run than there are cores.
crash: install ## the long tests: kill -9 at every step, under load and at random
	$(BIN)/python -m pytest -m slow --ignore tests/regtest --ignore tests/browser --ignore tests/container -n 3 --maxschedchunk 1 --durations 12

regtest: install ## the tests against real daemons: monerod, monero-wallet-rpc, anvil
	tools/regtest/install
	REGTEST_REQUIRED=1 $(BIN)/python -m pytest tests/regtest -n 5 --dist loadfile --no-loadscope-reorder --durations 12

regtest-demo: install ## the whole stack on regtest chains, and a swap each way
	tools/regtest/install
	$(BIN)/python -m tests.regtest.demo

regtest-soak: install ## orders, faults and reorganisations at random on the whole stack, then an audit
	tools/regtest/install
	$(BIN)/python -m tests.regtest.soak

simulate: install ## run whole services under random seeds: ENGINE=onchain or sandbox, SECONDS=60, ORDERS=100, JOBS= at once, one SEED= (LEFT_OUT= some faults) or from FIRST= on; or CUT= a scenario everywhere
	$(BIN)/python -m tests.simulation $(if $(CUT),--cut $(CUT) --size $(or $(SIZE),1) $(if $(AT),--at $(AT))) --engine $(or $(ENGINE),onchain) $(if $(SEED),--seed $(SEED) $(if $(LEFT_OUT),--left-out $(LEFT_OUT)),--seconds $(or $(SECONDS),60) $(if $(FIRST),--first $(FIRST))) --orders $(or $(ORDERS),100) $(if $(JOBS),--jobs $(JOBS))

mutants: install ## plant faults that could lose money, one at a time: NAMES= some, SUITE=simulation or test, SECONDS=60 each, JOBS= universes at once
	$(BIN)/python -m tests.mutants $(NAMES) --suite $(or $(SUITE),simulation) --seconds $(or $(SECONDS),60) $(if $(JOBS),--jobs $(JOBS))

mutation: $(MUTATION) ## mutate the domain's rules, and fail when more mutants survive than before: MODULES= some, BASE= a commit, JOBS=1
	$(BIN)/python -m tests.mutation $(MODULES) $(if $(BASE),--base $(BASE)) --jobs $(or $(JOBS),1)

fuzz: $(FUZZ) ## feed readers of strangers' bytes under coverage: TARGETS= some, SECONDS=25 each
	$(BIN)/python -m tests.fuzz $(TARGETS) --seconds $(or $(SECONDS),25)

cluster: install ## three replicas on PostgreSQL behind HAProxy: the demo over it, before and after a kill -9
	tools/cluster/install
	CLUSTER_REQUIRED=1 $(BIN)/python -m pytest tests/e2e/test_cluster.py
	$(BIN)/python -m tests.e2e.cluster

browser: install ## the pages in a real Chromium: whole swaps, each state, accessibility
	tools/browser/install
	BROWSER_REQUIRED=1 $(BIN)/python -m pytest tests/browser -n 2

container: install ## build the container without a daemon, swap in it and stop it (as root)
	tools/container/install
	CONTAINER_REQUIRED=1 $(BIN)/python -m pytest tests/container

screenshots: install ## write a picture of each state of an order, and of the front pages
	tools/browser/install
	$(BIN)/python -m tests.browser.screenshots

spectral: install ## lint the OpenAPI document (needs Node)
	tools/spectral/run.sh docs/generated/openapi.json

alerts: install ## test the alert rules (needs promtool)
	tools/alerts/install
	$(BIN)/python -m pytest tests/unit/test_prometheus_rules.py

conformance: install ## run the official MCP conformance suite (needs Node)
	tools/conformance/run.sh

clients: install ## generate foreign clients, and swap with each; load the MCP tools as models do (needs Node)
	tools/clients/run.sh

check: install ## lint, types, import direction, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.generate --check

generate: install ## write the generated files again
	$(BIN)/python -m tools.generate

lock: | $(BIN)/python ## pin the container's packages again, with their hashes
	$(BIN)/python -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet 'uv>=0.9,<1'
	$(PINS) --extra onchain --extra otel --extra postgres --extra top --extra tor --output-file config/requirements.txt pyproject.toml
	printf 'hatchling>=1.27\nsetuptools>=77\n' | $(PINS) --output-file config/requirements-build.txt -

# Without bytecode, which pip writes at an installation, each start would compile every module.
bench profile: export PYTHONDONTWRITEBYTECODE =
bench: $(BENCH) ## measure speed against the yardsticks (about a quarter of an hour)
	$(BIN)/python -m tests.bench

profile: install ## print where a create, a status and a plan spend their CPU (needs valgrind)
	$(BIN)/python -m tests.bench.profile

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results
