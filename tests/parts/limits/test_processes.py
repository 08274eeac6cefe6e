"""A process that writes to more memory than it may ends."""

from __future__ import annotations

import pytest

from llamacpp_instr.base import processes
from tests.base.test_processes import python

MIB = 1 << 20


@pytest.mark.native
@pytest.mark.parametrize(("taken", "status"), [(64, 0), (512, processes.OUT_OF_MEMORY)])
def test_a_process_that_writes_to_too_much_memory_ends(taken: int, status: int) -> None:
    code = f"""if True:
        import resource, time
        from llamacpp_instr.base.processes import _most_resident, _watched_memory
        # Linux counts what the process had before it became this program
        now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        before = max(_most_resident() - now, 0)
        with _watched_memory({256 * MIB}):
            kept = bytearray(b"x") * ({taken * MIB} + before)
            time.sleep(0 if {taken} < 256 else 600)
    """
    assert python(code).wait(300) == status
