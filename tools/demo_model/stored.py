"""Reading the tokenizer back out of a written file, without PyTorch and without llama.cpp."""

from pathlib import Path

import gguf

from tools.demo_model.tokenizer import Tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer that the demo model's file holds."""
    return Tokenizer.of_tokens(gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents())
