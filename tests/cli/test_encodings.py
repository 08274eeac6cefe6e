"""Characters that standard output or a terminal cannot show are replaced, in every encoding, and
error messages are not too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.base.terminal import MOST
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import DEMO, ROOT

pytestmark = pytest.mark.native

LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"


COMMANDS = ["summary LOG", "stats LOG --md", "report MODEL", "check LOG"]
# all commands run in one interpreter, which has the encoding
PROGRAM = """
import sys
from llamacpp_instr.__main__ import main
for line in sys.argv[1:]:
    sys.argv = ["instr", *line.split("\\t")]
    before = sys.stdout.buffer.tell()
    try:
        main()
    except SystemExit as left:
        assert left.code == 0, line
    sys.stdout.flush()
    assert sys.stdout.buffer.tell() > before, line
"""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp437", "utf-16"])
def test_every_encoding_shows_what_it_can(
    encoding: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    names = {"LOG": str(LOG), "MODEL": str(DEMO)}
    lines = ["\t".join(names.get(word, word) for word in line.split()) for line in COMMANDS]
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *lines], cwd=tmp_path, stdout=out,
            stderr=subprocess.PIPE, timeout=120, check=False,
            env={**environment, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_quantizer_speaks_utf_8_in_every_environment(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "quantize", DEMO, "--types", "Q8_0", "--dry-run"],
        cwd=tmp_path, capture_output=True, timeout=60, check=False,
        env={**environment, "PYTHONIOENCODING": "utf-16"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_quoted_value_is_cut(tmp_path: Path, instr: Instr) -> None:
    log = tmp_path / "long.log"
    first = LOG.read_bytes().splitlines(keepends=True)[0]
    log.write_bytes(first + b'{"event":"%s","t":1}\n' % (b"x" * 2_000_000))
    done = instr("cat", log)
    assert done.returncode == 2
    assert len(done.stderr) < 2 * MOST
    assert "unknown event `xxx" in done.stderr
    assert "…" in done.stderr
    for found in (instr("check", log), instr("check", log, "--json")):
        assert found.returncode == 1
        assert len(found.stdout) < 4 * MOST
    assert_refused(instr("cat", log, "--event", "y" * 100_000), "…")
