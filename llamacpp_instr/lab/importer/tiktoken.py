"""Llama 3's tokenizer: Meta stores the ranks of tiktoken, Hugging Face a tokenizer.json.

Ranks are lines of a token's bytes in base64 and its number. The names of special tokens are in
Meta's code only (`models/llama3/tokenizer.py` in llama-models, and its version for Llama 3.0).
"""

from __future__ import annotations

import base64
from itertools import count
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

N_SPECIAL = 256
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""how the text is split before tokens are merged"""
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"


def read_ranks(path: Path) -> dict[bytes, int] | None:
    """The rank of each token, which is its id, too; None if the file has another format."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError):
        return None
    return ranks if list(ranks.values()) == list(range(len(ranks))) else None


def write_tokenizer(ranks: dict[bytes, int], newer: bool, folder: Path) -> None:
    """Write Hugging Face's tokenizer files; `newer` are Llama 3.1 and later."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    tokens = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in merges_of(ranks)]
    made = Tokenizer(models.BPE(tokens, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special_tokens(newer))
    made.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN} $A", pair=f"{_BEGIN} $A {_BEGIN}:1 $B:1",
        special_tokens=[(_BEGIN, len(ranks))],
    )  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=_BEGIN, eos_token=_END
    ).save_pretrained(folder)


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that make a token, in the order of what they make, then of their own
    ranks, as in Hugging Face's files."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def special_tokens(newer: bool) -> list[str]:
    """Their names, in the order of their ids behind the last rank."""
    named = {0: _BEGIN, 1: _END, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
    if newer:
        named |= {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
    reserved = count()
    return [
        named.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(N_SPECIAL)
    ]
