# make demo   everything from nothing to a recorded session of the demo model and its trace
# make view   that session in Perfetto's UI, without the network
# make test   the test suite, in the same environment
# make lint   the checks that need no model
#
# make lint-native  the recorder's C and C++: llama.cpp's own warnings and clang-tidy, which it installs
# make audit      known vulnerabilities of what is installed here; 1 too where nothing could be asked
# make sanitize   the recorder under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; models are
#                 loaded and freed for STRESS_SECONDS (20) with each
# make test-docs  what README and docs let a newcomer do, in a fresh clone; needs an index; a quarter of an hour
# make image      the container image of docker/Dockerfile, with docker, podman or buildah
# make image-test that image, built and tried without an engine (Debian, as root; minutes)
# make docker-test  the docker lines of README and docs, on a Docker engine of its own (Debian, as root; minutes)
# make load       llama_cpp.server, recorded, with clients for LOAD_MINUTES (10); a table of what came of it
# make fuzz       every reader under a fuzzer, FUZZ_SECONDS each (60); needs atheris, which it installs
# make test-oldest  the suite with the oldest versions that pyproject.toml allows; TESTS names some
# make release    dist: sdist and wheel, tried in an empty environment; NATIVE=1: and the patched library
# make pictures   docs/images: what `instr view` shows, taken in Chromium
# make quantization   docs/quantization.md: the demo model in seven file types, measured
# make bench      what recording and converting cost, as ratios (most of an hour on a quiet machine)
#
# PYTHON is the interpreter that the environment .venv is made with.

PYTHON ?= python3
PROMPT ?= Once upon a time
export FUZZ_SECONDS ?= 60
LOAD_MINUTES ?= 10
STRESS_SECONDS ?= 20

BIN := .venv/bin
INSTALLED := .venv/.installed
VIEW_INSTALLED := .venv/.installed-view
TEST_INSTALLED := .venv/.installed-test
FUZZ_INSTALLED := .venv/.installed-fuzz
AUDIT := .venv-audit
OLDEST := .venv-oldest
OLDEST_INSTALLED := $(OLDEST)/.installed
# what drives a browser; tests of the UI are skipped where there is no node to run it
UI_KIT := $(if $(and $(shell command -v node),$(shell command -v npm)),ui-kit)
UI_INSTALLED := tests/ui/node_modules/.installed

.PHONY: demo view test test-oldest test-docs lint lint-native audit native sanitize image image-test docker-test
.PHONY: load fuzz release pictures quantization bench ui-kit clean

demo: native
	@mkdir -p out
	$(BIN)/instr run demo --prompt "$(PROMPT)" -n 64 --log out/demo.log \
	    --perfetto out/demo.pftrace --force

view: $(VIEW_INSTALLED)
	@[ -e out/demo.log ] || $(MAKE) demo
	$(BIN)/instr view out/demo.log

# a file's tests share what they record, so they run in one process
test: native $(TEST_INSTALLED) $(UI_KIT)
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

lint-native: $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet "clang-tidy~=23.1"
	$(BIN)/python -m tests.programs.lint_native --tidy

audit: $(TEST_INSTALLED) $(AUDIT)/bin/pip-audit
	$(BIN)/python -m tools.audit $(AUDIT)/bin/pip-audit

# in an environment of its own: it is not what is audited
$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit

# the library is that of `make native`, from the cache
test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST)/bin/instr build
	$(OLDEST)/bin/python -m pytest $(TESTS)

test-docs: $(TEST_INSTALLED)
	$(BIN)/python -m pytest tests/newcomer/suite.py --durations=0 --durations-min=1

release: $(INSTALLED)
	$(BIN)/python -m tools.release $(if $(NATIVE),--native)

sanitize: native $(TEST_INSTALLED)
	$(BIN)/python -m tests.programs.sanitize --seconds $(STRESS_SECONDS)

ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(if $(shell command -v $(engine)),$(engine))))
IMAGE ?= llamacpp-instr
# the health check is no part of the OCI format, which podman and buildah write unless told
FORMAT := $(if $(filter podman buildah,$(notdir $(ENGINE))),--format docker)

image:
	@[ -n "$(ENGINE)" ] || { echo "docker, podman or buildah is needed" >&2; exit 1; }
	$(ENGINE) build $(FORMAT) -f docker/Dockerfile -t $(IMAGE) .

# what ggml's kernels compile to is kept in this machine's ccache, across images
image-test: $(TEST_INSTALLED) $(UI_KIT)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache" \
	    tests/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/image/suite.py

# docker builds it again: buildah only makes what stands for the base image. The engine keeps its layers
docker-test: $(TEST_INSTALLED)
	BUILD_IMAGE_STANDINS=1 tests/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/image/engine_suite.py

load: native $(TEST_INSTALLED)
	$(BIN)/python -m tests.load --minutes $(LOAD_MINUTES)

fuzz: $(FUZZ_INSTALLED)
	$(BIN)/python -m tests.fuzz

pictures: native $(TEST_INSTALLED) ui-kit
	$(BIN)/python -m tests.programs.pictures

quantization: native $(TEST_INSTALLED)
	$(BIN)/python -m tools.quantization_page

bench: native $(TEST_INSTALLED)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.convert_json
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.quality

ui-kit: $(UI_INSTALLED)

$(UI_INSTALLED): tests/ui/package.json
	@cd tests/ui && npm install --no-package-lock --no-audit --no-fund --silent && touch ../../$@ || { \
	    echo "npm cannot install what the tests of the UI need; they will be skipped" >&2; [ -z "$$CI" ]; }

# takes a second when it was built before: the build has a cache of its own
native: $(INSTALLED)
	$(BIN)/instr build

$(INSTALLED): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VIEW_INSTALLED): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e ".[view]"
	@touch $@ $(INSTALLED)

$(TEST_INSTALLED): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e ".[test]"
	@touch $@ $(INSTALLED) $(VIEW_INSTALLED)

$(FUZZ_INSTALLED): $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet atheris
	@touch $@

# the oldest versions have wheels for Python 3.10 and 3.11
$(OLDEST_INSTALLED): pyproject.toml tools/oldest.py
	$(PYTHON) -m venv --clear $(OLDEST)
	$(PYTHON) -m tools.oldest > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -e ".[test]" -c $(OLDEST)/constraints.txt
	@touch $@

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) is missing (Debian, Ubuntu: apt install python3)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Python 3.10 or newer is needed, $(PYTHON) is older; name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) has no venv (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	    echo "a C++ compiler is missing (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv $(AUDIT) $(OLDEST) out
