"""What ran on other devices than the CPU, of which a log has no kernels."""

from __future__ import annotations

from llamacpp_instr.graph.kernels import untimed_backends
from llamacpp_instr.log.session import Session


def untimed_note(session: Session) -> str:
    """A sentence for tables of kernels; empty if all kernels are timed."""
    found = {name for graph in session.graphs.values() for name in untimed_backends(graph)}
    if not found:
        return ""
    return f"Kernels on {', '.join(sorted(found))} are not timed, so no row has them."
