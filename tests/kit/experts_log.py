"""A log of a model with experts, for figures by hand: two layers with 4 experts, a prompt of 3
tokens with 2 experts each, and two tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from tests.kit.reports import session_of

LOG = Path(__file__).parent.parent / "fixtures" / "experts.log"
EXPERT = 64 * 256 * 2
"""bytes of one expert of up, and of down"""


def events() -> list[s.Event]:
    """All but the end."""
    lines = LOG.read_bytes().splitlines()[:-1]
    return [msgspec.json.decode(line, type=s.AnyEvent) for line in lines]


def without_experts(path: Path) -> Session:
    """As an earlier version records it."""
    return session_of(path, [event for event in events() if not isinstance(event, s.Experts)])
