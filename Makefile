# make demo         build everything, record a session of the demo model, write its trace; 5 minutes, later seconds
# make view         open that session in Perfetto's UI, without the network
# make test         run the test suite in the same environment; 5 minutes
# make test-all     run every other test, in parts with needs of their own; PARTS=browser,unpatched selects some;
#                   an hour and a half. `make parts` lists them, with their minutes and what this machine lacks
# make explore      run hypothesis's tests with other examples than `make test`, ROUNDS (5) times; a failing one is
#                   printed as a line to paste; 10 minutes
# make lint         run ruff and mypy, for Linux and for macOS; a minute
# make docs         build the pages of docs/ as a site in out/site; a dead link is an error; seconds
# make help         print this
#
# make lint-native  check the recorder's C and C++ with llama.cpp's own warnings and with clang-tidy, which it installs;
#                   5 minutes
# make audit        look for known vulnerabilities of installed packages; exits with status 1 if no index answers; a minute
# make test-edited  build the tree that `python -m tools.patches edit` made in EDITED, and test its library and its
#                   llama-server, also of another release; with ccache if it is installed; 10 minutes
# make test-oldest  run the suite with the oldest versions that pyproject.toml allows; TESTS selects files; 15 minutes
# make image        build the container image of docker/Dockerfile with docker, podman or buildah; 15 minutes
# make image-test   build and test that image without an engine (Debian, as root; 15 minutes); SLICE=1, as in CI,
#                   has the kernels of AVX2 in place of 14 modules, shares the rest with `make native`, and does
#                   not test other CPUs
# make image-vulkan-test
#                   the same for the image with Vulkan, on Debian 13; half an hour
# make image-arm64-test
#                   the same for the image for arm64, whose programs qemu runs; half an hour
# make docker-test  run the docker commands of README and docs on a separate Docker engine (Debian, as root); 20 minutes
# make load         record llama_cpp.server with clients for LOAD_MINUTES (10), and print a table of the results;
#                   LIVE=1 shows it with instr live meanwhile
# make mutate       make MUTANTS (60) small mistakes in the product, and count how many the tests notice;
#                   SEED (1) draws others; NEAR=1 runs only the tests of the module's folder; half an hour
# make mutate-native
#                   the same with the recorder's C and C++: each mistake is compiled; installs universalmutator; an hour
# make fuzz         fuzz every reader for FUZZ_SECONDS (60) each; installs atheris; 5 minutes
# make release      write sdist and wheel to dist and try them in an empty environment; NATIVE=1 adds the library; 2 minutes
# make pictures     take docs/images of `instr view`, `page`, `weights`, `debug` and of Netron in Chromium, and draw charts;
#                   10 minutes
# make quantization measure the demo model in seven file types, and write docs/how-to/choose-a-quantization.md; 5 minutes
# make bench        measure the cost of recording and converting, as ratios; half an hour; leave the machine alone
#
# PYTHON is the interpreter for the environment .venv. The minutes are those of two CPUs.

PYTHON ?= python3
PROMPT ?= Once upon a time
export FUZZ_SECONDS ?= 60
ROUNDS ?= 5
LOAD_MINUTES ?= 10
PARTS ?= all
MUTANTS ?= 60
SEED ?= 1
AT_LEAST ?= 0

BIN := .venv/bin
INSTALLED := .venv/.installed
VIEW_INSTALLED := .venv/.installed-view
TEST_INSTALLED := .venv/.installed-test
DEV_INSTALLED := .venv/.installed-dev
FUZZ_INSTALLED := .venv/.installed-fuzz
AUDIT := .venv-audit
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
CUDA := .venv-cuda
CUDA_INSTALLED := $(CUDA)/.installed
MACOS := .venv-macos
MACOS_INSTALLED := $(MACOS)/.installed
OLDEST := .venv-oldest
OLDEST_INSTALLED := $(OLDEST)/.installed
UI_INSTALLED := tests/ui/node_modules/.installed

.PHONY: demo view test test-all parts explore test-edited test-oldest lint docs help lint-native audit native
.PHONY: image image-test image-vulkan-test image-arm64-test docker-test load mutate mutate-native fuzz release
.PHONY: pictures quantization bench ui-kit cuda-compiler macos-compiler peers clean

demo: native
	@mkdir -p out
	$(BIN)/instr run demo --prompt "$(PROMPT)" -n 64 --log out/demo.log \
	    --perfetto out/demo.pftrace --force

view: $(VIEW_INSTALLED)
	@[ -e out/demo.log ] || $(MAKE) demo
	$(BIN)/instr view out/demo.log

# The tests of a file share recordings, so one process runs them all. The two variables save CPU time: Python keeps
# what it compiles, and OpenMP's threads do not spin while they wait. Some tests wait, so there is one worker more than
# CPUs; xdist would begin with the files of many tests, and end with one slow file on one CPU.
WORKERS = $(shell $(PYTHON) -c "import os; \
    print(len(os.sched_getaffinity(0)) + 1 if hasattr(os, 'sched_getaffinity') else os.cpu_count() + 1)")
SUITE = -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --instafail -o faulthandler_timeout=400
IN_SUITE := env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive

test: native $(TEST_INSTALLED)
	$(IN_SUITE) $(BIN)/python $(SUITE)

comma := ,
test-all: native $(DEV_INSTALLED)
	$(BIN)/python -m tools.suite_parts $(subst $(comma), ,$(PARTS))

parts: $(INSTALLED)
	@$(BIN)/python -m tools.suite_parts

# hypothesis makes a failing example smaller, for minutes
explore: native $(TEST_INSTALLED)
	@for round in $$(seq $(ROUNDS)); do \
	    echo "round $$round of $(ROUNDS)"; \
	    $(IN_SUITE) $(BIN)/python $(SUITE) -o faulthandler_timeout=3600 -m hypothesis \
	        --hypothesis-profile explore || exit; \
	done

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

lint: $(DEV_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy & linux=$$!; \
	    $(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin; darwin=$$?; wait $$linux && exit $$darwin

docs: $(DEV_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo out/site/index.html

lint-native: $(DEV_INSTALLED)
	$(BIN)/python -m pip install --quiet "clang-tidy~=23.1"
	$(BIN)/python -m tests.programs.lint_native --tidy

audit: $(DEV_INSTALLED) $(AUDIT)/bin/pip-audit
	$(BIN)/python -m tools.audit $(AUDIT)/bin/pip-audit

# has its own environment, so that pip-audit does not audit itself
$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit

# `instr build` takes the library of `make native` from the cache
test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST)/bin/instr build
	$(IN_SUITE) $(OLDEST)/bin/python $(SUITE) $(TESTS)

# nothing is exported or installed: the tests find the library and the programs of that tree by their environment
EDITED_BUILD = $(EDITED)-build
EDITED_TESTS = tests/recording/test_recording.py tests/parts/programs/test_llama_server.py tests/parts/programs/test_llama_server_reuse.py
CCACHE := $(shell command -v ccache)

test-edited: $(TEST_INSTALLED)
	@[ -n "$(EDITED)" ] || { echo "name the tree: make test-edited EDITED=DIR" >&2; exit 1; }
	cmake -G Ninja -S $(EDITED)/vendor/llama.cpp -B $(EDITED_BUILD) -DCMAKE_BUILD_TYPE=Release \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
	    $(if $(CCACHE),-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache) $(CMAKE_ARGS)
	cmake --build $(EDITED_BUILD) --target llama llama-server llama-speculative-simple
	PYTHONPATH=$(EDITED) LLAMA_CPP_LIB_PATH=$(EDITED_BUILD)/bin EDITED_PROGRAMS=$(EDITED_BUILD)/bin \
	    $(IN_SUITE) $(BIN)/python -m pytest -q $(EDITED_TESTS)

release: $(INSTALLED)
	$(BIN)/python -m tools.release $(if $(NATIVE),--native)

ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(if $(shell command -v $(engine)),$(engine))))
IMAGE ?= llamacpp-instr
# podman and buildah write the OCI format by default, which has no health check
FORMAT := $(if $(filter podman buildah,$(notdir $(ENGINE))),--format docker)

image:
	@[ -n "$(ENGINE)" ] || { echo "docker, podman or buildah is needed" >&2; exit 1; }
	$(ENGINE) build $(FORMAT) -f docker/Dockerfile -t $(IMAGE) .

# the ccache of this machine keeps ggml's compiled kernels across images
ONE_CPU = --build-arg CMAKE_ARGS='-DGGML_CPU_ALL_VARIANTS=OFF -DGGML_BACKEND_DL=OFF'
image-test: $(DEV_INSTALLED) ui-kit
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg PROGRAMS=1 $(if $(SLICE),$(ONE_CPU))" \
	    tests/parts/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/parts/image/test_image.py $(if $(SLICE),-k "not older_cpu and not this_cpu")

image-vulkan-test: $(DEV_INSTALLED)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg BACKEND=vulkan --build-arg BASE=debian:trixie-slim --build-arg RUNTIME=debian:trixie-slim" \
	    tests/parts/image/build_image.sh . docker/Dockerfile $(IMAGE)-vulkan \
	    $(BIN)/python -m pytest tests/parts/image/test_vulkan.py

# x86-64 compiles for arm64, and qemu runs everything else
image-arm64-test: $(DEV_INSTALLED)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg TARGETARCH=arm64 --build-arg BASE=amd64/debian:trixie-slim \
	    --build-arg RUNTIME=arm64v8/debian:trixie-slim" \
	    tests/parts/image/build_image.sh . docker/Dockerfile $(IMAGE)-arm64 \
	    $(BIN)/python -m pytest tests/parts/image/test_arm64.py

# buildah only makes the substitute for the base image; docker builds the image, and its engine keeps the layers
docker-test: $(DEV_INSTALLED)
	BUILD_IMAGE_STANDINS=1 tests/parts/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/parts/image/test_engine.py

load: native $(DEV_INSTALLED)
	$(BIN)/python -m tests.load --minutes $(LOAD_MINUTES) $(if $(LIVE),--live)

mutate: $(DEV_INSTALLED)
	$(BIN)/python -m tools.mutate --count $(MUTANTS) --seed $(SEED) --at-least $(AT_LEAST) $(if $(NEAR),--near) \
	    $(if $(NATIVE),--native)

# without its dependencies, which its rules for lines do not need
mutate-native: native $(DEV_INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps "universalmutator~=1.14"
	$(BIN)/python -m tests.programs.mutate_native --seed $(SEED) --count $(MUTANTS)

fuzz: $(FUZZ_INSTALLED)
	$(BIN)/python -m tests.fuzz

pictures: native $(DEV_INSTALLED) ui-kit
	$(BIN)/python -m tests.programs.pictures

quantization: native $(DEV_INSTALLED)
	$(BIN)/python -m tools.quantization_page

bench: native $(DEV_INSTALLED)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.overhead --devices
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.convert_json
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.schedule_scale
	$(BIN)/python -m benchmarks.quality

ui-kit: $(UI_INSTALLED)

$(UI_INSTALLED): tests/ui/package.json
	@cd tests/ui && npm install --no-package-lock --no-audit --no-fund --silent && touch ../../$@

# of `make test-all`: environments of their own
cuda-compiler: $(CUDA_INSTALLED)

macos-compiler: $(MACOS_INSTALLED)

peers: $(PEERS_INSTALLED) ui-kit
	$(PEERS)/bin/instr build
	$(PEERS)/bin/python -m pytest -n 2 --dist loadfile tests/parts/peers --durations=0 --durations-min=5

# takes a second after the first build, which is cached
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

$(DEV_INSTALLED): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@ $(INSTALLED) $(VIEW_INSTALLED) $(TEST_INSTALLED)

$(FUZZ_INSTALLED): $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet atheris
	@touch $@

# has its own environment, because PyTorch is a hundred times as large as the others
$(PEERS_INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -e ".[peers]"
	$(PEERS)/bin/python -m pip install --quiet --no-deps \
	    aiperf==0.13.0 flashinfer-bench==0.1.2 HolisticTraceAnalysis==0.5.0
	@touch $@

# cuBLAS has 400 MB more than its headers, which are needed; its own dependencies are not
$(CUDA_INSTALLED):
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet "nvidia-cuda-nvcc==13.*" "nvidia-nvvm==13.*" "nvidia-cuda-crt==13.*" \
	    "nvidia-cuda-runtime==13.*" "nvidia-cuda-cccl==13.*" "nvidia-cuda-cupti==13.*"
	$(CUDA)/bin/python -m pip install --quiet --no-deps "nvidia-cublas==13.*"
	@touch $@

$(MACOS_INSTALLED):
	$(PYTHON) -m venv $(MACOS)
	$(MACOS)/bin/python -m pip install --quiet "ziglang==0.17.*"
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
	rm -rf .venv $(AUDIT) $(CUDA) $(MACOS) $(OLDEST) $(PEERS) out
