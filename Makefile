# make demo         build everything, record a session of the demo model, write its trace
# make view         open that session in Perfetto's UI, without the network
# make test         run the test suite in the same environment
# make lint         run ruff and mypy, for Linux and for macOS
# make docs         build the pages of docs/ as a site in out/site; a dead link is an error
#
# make lint-native  check the recorder's C and C++ with llama.cpp's own warnings and with clang-tidy (installs it)
# make audit        look for known vulnerabilities of installed packages; exits with status 1 if no index answers
# make sanitize     run the recorder under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; each
#                   loads and frees models for STRESS_SECONDS (20)
# make test-peers   compare imports with transformers, exports with the tools that read them; installs PyTorch (5 GB)
# make test-devices more modes of Vulkan; 20 architectures, a real model and llama-bench on devices; minutes
# make test-cuda    compile the CUDA backend for two GPUs, and test what reads CUPTI with stand-ins; needs no GPU, installs
#                   NVIDIA's compiler (1 GB)
# make test-arm64   cross compile the library for arm64 and run the recorder's own tests with qemu; minutes
# make test-macos   compile the recorder and what the patches change for macOS; installs Zig (400 MB). LINK=1 also links
#                   the whole library and llama-server, without Metal and Accelerate; minutes
# make test-edited  build the tree that `python -m tools.patches edit` made in EDITED, and test its library and its
#                   llama-server, also of another release; with ccache if it is installed
# make test-docs    run what README and docs tell a newcomer, in a fresh clone; needs an index; 20 minutes
# make image        build the container image of docker/Dockerfile with docker, podman or buildah
# make image-test   build and test that image without an engine (Debian, as root; minutes); SLICE=1, as in CI,
#                   has the kernels of AVX2 in place of 14 modules, shares the rest with `make native`, and does
#                   not test other CPUs
# make image-vulkan-test
#                   the same for the image with Vulkan, on Debian 13 (half an hour)
# make image-arm64-test
#                   the same for the image for arm64, whose programs qemu runs (half an hour)
# make docker-test  run the docker commands of README and docs on a separate Docker engine (Debian, as root; minutes)
# make load         record llama_cpp.server with clients for LOAD_MINUTES (10), and print a table of the results;
#                   LIVE=1 shows it with instr live meanwhile
# make mutate       make MUTANTS (60) small mistakes in the product, and count how many the tests notice;
#                   SEED (1) draws others; NEAR=1 runs only the tests of the module's folder, in seconds;
#                   NATIVE=1 also runs the native tests, for hours
# make mutate-native
#                   the same with the recorder's C and C++: each mistake is compiled; installs universalmutator; an hour
# make fuzz         fuzz every reader for FUZZ_SECONDS (60) each; installs atheris
# make test-oldest  run the suite with the oldest versions that pyproject.toml allows; TESTS selects files
# make release      write sdist and wheel to dist and try them in an empty environment; NATIVE=1 adds the library
# make pictures     take docs/images of `instr view`, `page`, `weights`, `debug` and of Netron in Chromium, and draw charts
# make quantization measure the demo model in seven file types, and write docs/how-to/choose-a-quantization.md
# make bench        measure the cost of recording and converting, as ratios (half an hour; leave the machine alone)
#
# PYTHON is the interpreter for the environment .venv.

PYTHON ?= python3
PROMPT ?= Once upon a time
export FUZZ_SECONDS ?= 60
LOAD_MINUTES ?= 10
STRESS_SECONDS ?= 20
MUTANTS ?= 60
SEED ?= 1
AT_LEAST ?= 0

BIN := .venv/bin
INSTALLED := .venv/.installed
VIEW_INSTALLED := .venv/.installed-view
TEST_INSTALLED := .venv/.installed-test
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
# drives a browser; without node the tests of the UI are skipped
UI_KIT := $(if $(and $(shell command -v node),$(shell command -v npm)),ui-kit)
UI_INSTALLED := tests/ui/node_modules/.installed

.PHONY: demo view test test-arm64 test-devices test-cuda test-macos test-edited test-oldest test-peers test-docs docs lint lint-native audit native sanitize image image-test image-vulkan-test image-arm64-test docker-test
.PHONY: load mutate mutate-native fuzz release pictures quantization bench ui-kit clean

demo: native
	@mkdir -p out
	$(BIN)/instr run demo --prompt "$(PROMPT)" -n 64 --log out/demo.log \
	    --perfetto out/demo.pftrace --force

view: $(VIEW_INSTALLED)
	@[ -e out/demo.log ] || $(MAKE) demo
	$(BIN)/instr view out/demo.log

# the tests of a file share recordings, so one process runs them all; what takes minutes to compile is there
# before they start, so that a test that hangs ends sooner. The two variables save CPU time: Python keeps
# what it compiles, and OpenMP's threads do not spin while they wait. Some tests wait, so there are two workers
# more than CPUs; xdist would begin with the files of many tests, and end with one slow file on one CPU.
WORKERS = $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 2)")
SUITE = -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --instafail -o faulthandler_timeout=400
IN_SUITE := env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive

test: native $(TEST_INSTALLED) $(UI_KIT)
	$(BIN)/python -m tests.kit.native_kit
	$(IN_SUITE) $(BIN)/python $(SUITE)

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy & linux=$$!; \
	    $(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin; darwin=$$?; wait $$linux && exit $$darwin

docs: $(TEST_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo out/site/index.html

lint-native: $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet "clang-tidy~=23.1"
	$(BIN)/python -m tests.programs.lint_native --tidy

audit: $(TEST_INSTALLED) $(AUDIT)/bin/pip-audit
	$(BIN)/python -m tools.audit $(AUDIT)/bin/pip-audit

# has its own environment, so that pip-audit does not audit itself
$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit

# `instr build` takes the library of `make native` from the cache
test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST)/bin/instr build
	$(OLDEST)/bin/python -m tests.kit.native_kit
	$(IN_SUITE) $(OLDEST)/bin/python $(SUITE) $(TESTS)

# has its own environment, because PyTorch is a hundred times as large as the others
test-peers: $(PEERS_INSTALLED) $(UI_KIT)
	$(PEERS)/bin/instr build
	$(PEERS)/bin/python -m pytest -n 2 --dist loadfile tests/peers/*_suite.py --durations=0 --durations-min=5

# its shaders take the driver minutes; speeds are compared while nothing else runs
test-devices: native $(TEST_INSTALLED)
	$(BIN)/python -m tests.kit.backends
	$(IN_SUITE) $(BIN)/python -m pytest -n 2 tests/recording/vulkan_suite.py tests/recording/devices_suite.py \
	    -k "not llama_bench" --durations=0 --durations-min=5
	$(IN_SUITE) $(BIN)/python -m pytest tests/recording/devices_suite.py -k llama_bench

# the speeds of an emulated processor mean nothing
test-arm64: native $(TEST_INSTALLED)
	$(IN_SUITE) $(BIN)/python -m tests.programs.arm64

test-cuda: native $(TEST_INSTALLED) $(CUDA_INSTALLED)
	$(IN_SUITE) $(BIN)/python -m pytest tests/recording/cuda_suite.py --durations=0 --durations-min=5

test-macos: $(TEST_INSTALLED) $(MACOS_INSTALLED)
	$(IN_SUITE) $(BIN)/python -m pytest tests/recording/macos_suite.py $(if $(LINK),,-k "not intel and not link") \
	    --durations=0 --durations-min=5

# nothing is exported or installed: the tests find the library and the programs of that tree by their environment
EDITED_BUILD = $(EDITED)-build
EDITED_TESTS = tests/recording/test_recording.py tests/recording/test_llama_server.py tests/recording/test_llama_server_reuse.py
CCACHE := $(shell command -v ccache)

test-edited: $(TEST_INSTALLED)
	@[ -n "$(EDITED)" ] || { echo "name the tree: make test-edited EDITED=DIR" >&2; exit 1; }
	cmake -G Ninja -S $(EDITED)/vendor/llama.cpp -B $(EDITED_BUILD) -DCMAKE_BUILD_TYPE=Release \
	    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
	    $(if $(CCACHE),-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache) $(CMAKE_ARGS)
	cmake --build $(EDITED_BUILD) --target llama llama-server llama-speculative-simple
	PYTHONPATH=$(EDITED) LLAMA_CPP_LIB_PATH=$(EDITED_BUILD)/bin EDITED_PROGRAMS=$(EDITED_BUILD)/bin \
	    $(IN_SUITE) $(BIN)/python -m pytest -q $(EDITED_TESTS)

test-docs: $(TEST_INSTALLED)
	$(BIN)/python -m pytest tests/newcomer/suite.py --durations=0 --durations-min=1

release: $(INSTALLED)
	$(BIN)/python -m tools.release $(if $(NATIVE),--native)

sanitize: native $(TEST_INSTALLED)
	$(BIN)/python -m tests.programs.sanitize --seconds $(STRESS_SECONDS)

ENGINE ?= $(firstword $(foreach engine,docker podman buildah,$(if $(shell command -v $(engine)),$(engine))))
IMAGE ?= llamacpp-instr
# podman and buildah write the OCI format by default, which has no health check
FORMAT := $(if $(filter podman buildah,$(notdir $(ENGINE))),--format docker)

image:
	@[ -n "$(ENGINE)" ] || { echo "docker, podman or buildah is needed" >&2; exit 1; }
	$(ENGINE) build $(FORMAT) -f docker/Dockerfile -t $(IMAGE) .

# the ccache of this machine keeps ggml's compiled kernels across images
ONE_CPU = --build-arg CMAKE_ARGS='-DGGML_CPU_ALL_VARIANTS=OFF -DGGML_BACKEND_DL=OFF'
image-test: $(TEST_INSTALLED) $(UI_KIT)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg PROGRAMS=1 $(if $(SLICE),$(ONE_CPU))" \
	    tests/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/image/suite.py $(if $(SLICE),-k "not older_cpu and not this_cpu")

image-vulkan-test: $(TEST_INSTALLED)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg BACKEND=vulkan --build-arg BASE=debian:trixie-slim --build-arg RUNTIME=debian:trixie-slim" \
	    tests/image/build_image.sh . docker/Dockerfile $(IMAGE)-vulkan \
	    $(BIN)/python -m pytest tests/image/vulkan_suite.py

# x86-64 compiles for arm64, and qemu runs everything else
image-arm64-test: $(TEST_INSTALLED)
	@mkdir -p "$${CCACHE_DIR:-$$HOME/.cache/ccache}"
	BUILD_IMAGE_FLAGS="$$BUILD_IMAGE_FLAGS --volume $${CCACHE_DIR:-$$HOME/.cache/ccache}:/root/.cache/ccache \
	    --build-arg TARGETARCH=arm64 --build-arg BASE=amd64/debian:trixie-slim \
	    --build-arg RUNTIME=arm64v8/debian:trixie-slim" \
	    tests/image/build_image.sh . docker/Dockerfile $(IMAGE)-arm64 \
	    $(BIN)/python -m pytest tests/image/arm64_suite.py

# buildah only makes the substitute for the base image; docker builds the image, and its engine keeps the layers
docker-test: $(TEST_INSTALLED)
	BUILD_IMAGE_STANDINS=1 tests/image/build_image.sh . docker/Dockerfile $(IMAGE) \
	    $(BIN)/python -m pytest tests/image/engine_suite.py

load: native $(TEST_INSTALLED)
	$(BIN)/python -m tests.load --minutes $(LOAD_MINUTES) $(if $(LIVE),--live)

mutate: $(TEST_INSTALLED)
	$(BIN)/python -m tools.mutate --count $(MUTANTS) --seed $(SEED) --at-least $(AT_LEAST) $(if $(NEAR),--near) \
	    $(if $(NATIVE),--native)

# without its dependencies, which its rules for lines do not need
mutate-native: native $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps "universalmutator~=1.14"
	$(BIN)/python -m tests.programs.mutate_native --seed $(SEED) --count $(MUTANTS)

fuzz: $(FUZZ_INSTALLED)
	$(BIN)/python -m tests.fuzz

pictures: native $(TEST_INSTALLED) ui-kit
	$(BIN)/python -m tests.programs.pictures

quantization: native $(TEST_INSTALLED)
	$(BIN)/python -m tools.quantization_page

bench: native $(TEST_INSTALLED)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.overhead --devices
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.convert_json
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.schedule_scale
	$(BIN)/python -m benchmarks.quality

ui-kit: $(UI_INSTALLED)

$(UI_INSTALLED): tests/ui/package.json
	@cd tests/ui && npm install --no-package-lock --no-audit --no-fund --silent && touch ../../$@ || { \
	    echo "npm cannot install the dependencies of the UI tests; they will be skipped" >&2; [ -z "$$CI" ]; }

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

$(FUZZ_INSTALLED): $(TEST_INSTALLED)
	$(BIN)/python -m pip install --quiet atheris
	@touch $@

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
