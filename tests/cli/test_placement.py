"""`instr run` puts layers where its options say; what does not exist is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Instr, assert_refused

pytestmark = pytest.mark.native
RUN = ("run", "demo", "-p", "a", "-n", "2", "--log", "a.log", "--force")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu-layers 2", "--gpu-layers 2: there is no such device; run `instr build --backend"),
        ("--device Vulkan0", "run `instr build --backend vulkan`"),
        ("--device CUDA0", "run `instr build --backend cuda`"),
        ("--tensor-split 1,2", "2 shares; the devices are: none"),
        ("--tensor-split 1,x", "1,x is not a list of shares"),
        ("--tensor-split 0,0", "0,0 is not a list of shares"),
        ("--override-tensor ffn", "'ffn' is not PATTERN=BUFFER"),
        ("--override-tensor x=Vulkan0", "there is no buffer 'Vulkan0', only CPU"),
        ("--override-tensor (=CPU", "unterminated subpattern"),
    ],
)
def test_what_is_not_there_is_one_line(instr: Instr, words: str, message: str) -> None:
    assert_refused(instr(*RUN, *words.split()), message)


@pytest.mark.parametrize("name", ["missing.so", "empty.so"])
def test_a_backend_that_does_not_load_is_one_line(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    (tmp_path / "empty.so").touch()
    monkeypatch.setitem(environment, "GGML_BACKEND_PATH", str(tmp_path / name))
    assert_refused(started_instr(*RUN), "GGML_BACKEND_PATH: ", name)
