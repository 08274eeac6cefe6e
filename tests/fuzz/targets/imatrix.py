"""Importance matrices, both formats."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.model.imatrix import load_imatrix

KIND = "imatrix"


def attempt(path: Path) -> None:
    matrix = load_imatrix(path)
    matrix.metadata()
