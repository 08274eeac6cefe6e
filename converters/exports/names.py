"""What sessions, machines and models are called in tables and in a fleet."""

from __future__ import annotations

import hashlib
import re

from llamacpp_instr.log.schema import Model, SessionStart

LONGEST_HOST = 200
"""bytes of a folder's name; file systems allow 255"""


def id_of(start: object, name: str) -> str:
    """The id of a log by its first event; that of a later part of a rotated log has the part's
    number. Logs of other formats have none, so their names tell them apart."""
    if not isinstance(start, SessionStart) or not re.fullmatch("[0-9A-Za-z]{1,64}", start.id):
        return hashlib.sha256(name.encode()).hexdigest()[:16]
    return start.id if start.part == 1 else f"{start.id}-{start.part}"


def host_of(start: SessionStart) -> str:
    """The name of a machine without one, such as AMD-EPYC-2-cores-24-GiB: logs have no
    host names."""
    host = start.host
    words = f"{host.cpu or 'unknown'} {host.cores} cores {host.memory / 2**30:.0f} GiB"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")[:LONGEST_HOST]


def name_of(model: Model) -> str:
    """What a model is called: its own name, or that of its file."""
    return model.name or model.path.rpartition("/")[2] or model.description
