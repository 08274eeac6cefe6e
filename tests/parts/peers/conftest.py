"""The imported models that several peer suites share.

`make test` also reads this file, and has no PyTorch: what needs it is imported by the fixture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.lab.importer.source import import_model, open_source

DECODERS = ("llama", "qwen3", "gemma3", "phi3", "mixtral")


@pytest.fixture(scope="session", params=DECODERS)
def decoder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A model of transformers, its folder, and the file that it became."""
    from tests.parts.peers import peer_models

    assert tuple(peer_models.DECODERS) == DECODERS
    # llama.cpp demands certain tokens of a model whose name says phi3; a name comes from a folder's
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model = peer_models.DECODERS[request.param](folder)
    imported = folder.with_suffix(".gguf")
    import_model(open_source(folder), imported, "F32")
    return model, folder, imported
