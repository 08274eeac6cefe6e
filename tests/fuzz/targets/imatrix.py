"""Importance matrices, both formats."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.model.imatrix import load_imatrix


def imatrix(path: Path) -> None:
    load_imatrix(path).metadata()
