"""No code of a model's folder runs in a child process: neither a pickle's nor a Python file's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import UsageError


def run_no_code_of_the_folder() -> None:
    """Make transformers refuse the Python files that a folder may bring, and torch any pickle."""
    import torch
    import transformers.dynamic_module_utils as remote

    def refuse(class_name: str, module_path: str | os.PathLike[str], **_: Any) -> None:
        raise UsageError(
            f"the model needs its own Python code ({class_name} in {Path(module_path).name}), "
            "which instr does not run"
        )

    load = torch.load
    remote.get_class_in_module = refuse
    remote.TIME_OUT_REMOTE_CODE = 0  # it would ask on standard input
    torch.load = lambda *args, **options: load(*args, **{**options, "weights_only": True})


def check_pickles(files: list[Path]) -> None:
    """Raises UsageError for a pickle with more than tensors, which libraries would only refuse."""
    from llamacpp_instr.lab.importer.meta import load_tensors, pickled_files

    for file in pickled_files(files):
        load_tensors(file)
