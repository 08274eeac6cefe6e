"""What `make sanitize` takes for a finding of ours."""

from __future__ import annotations

from tests.programs.sanitize import races

REPORT = """==================
WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x1 by thread T3:
    #0 memcpy interceptors.inc:827 (libtsan.so.2+0x1)
    #1 {first} <null> (libggml-cpu.so.0+0x1)

  Previous write of size 8 at 0x1 by thread T1:
    #0 ggml_compute_forward_mul_mat <null> (libggml-cpu.so.0+0x1)
    #1 llama_decode <null> (libllama.so.0+0x1)

  Location is heap block of size 64 at 0x1 allocated by thread T1:
    #0 posix_memalign interceptors.cpp:839 (libtsan.so.2+0x1)
"""


def test_two_kernels_of_ggml_are_not_ours() -> None:
    assert races(REPORT.format(first="ggml_compute_forward_flash_attn_ext")) == ([], 1)


def test_one_access_from_anywhere_else_is() -> None:
    ours, kernels = races(REPORT.format(first="ggml_graph_compute_thread"))
    assert (len(ours), kernels) == (1, 0)
