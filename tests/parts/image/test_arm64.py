"""The image for arm64 records the demo on emulated processors: `make image-arm64-test`.

qemu runs every program of the image. On an emulated CPU, an instruction that it lacks ends the
process, as on the real one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.parts.image.container import Image, buildah
from tests.parts.image.test_image import NOBODY, owned, session_start


@pytest.fixture(scope="session")
def image() -> Image:
    return Image(os.environ["IMAGE"])


def test_the_image_is_for_arm64(image: Image) -> None:
    about = json.loads(buildah("inspect", "--type", "image", image.name))
    assert about["OCIv1"]["architecture"] == about["Docker"]["architecture"] == "arm64"


@pytest.mark.parametrize(
    ("cpu", "has", "lacks"),
    [
        ("cortex-a72", {"NEON"}, {"DOTPROD", "MATMUL_INT8", "SVE"}),
        ("neoverse-n1", {"NEON", "DOTPROD", "FP16_VA"}, {"MATMUL_INT8", "SVE"}),
        ("max", {"NEON", "DOTPROD", "MATMUL_INT8", "SVE"}, set()),
    ],
)
def test_the_demo_is_recorded_with_the_kernels_of_the_cpu(
    image: Image, tmp_path: Path, cpu: str, has: set[str], lacks: set[str]
) -> None:
    emulated = ["env", f"QEMU_CPU={cpu}", "instr"]
    volumes = {owned(tmp_path, NOBODY): "/out"}
    done = image.run(
        *("run", "demo", "--prompt", "Once upon a time", "-n", "16", "--log", "/out/session.log"),
        entrypoint=emulated, user=NOBODY, volumes=volumes,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5, "the story goes on"
    log = tmp_path / "session.log"
    assert list(check_log(log)) == []
    assert sum(event["event"] == "token" for event in read_events(log)) == 16
    start = session_start(log)
    assert (start["clock"], start["host"]["os"].split()[-1]) == ("cntvct", "aarch64")
    features = set(start["host"]["features"])
    assert has <= features
    assert not lacks & features
    seen = image.run("summary", "session.log", entrypoint=emulated, user=NOBODY, volumes=volumes)
    assert seen.returncode == 0, seen.stderr


def test_it_says_that_recording_works(image: Image) -> None:
    done = image.run("doctor", "--json", user=NOBODY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["missing"]) == (True, {})
