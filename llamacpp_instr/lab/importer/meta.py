"""Meta's own layout of a Llama: configuration, tensors and tokenizer as Hugging Face has them.

A tensor that model-parallel shards split is joined along the axis that Meta's code splits
(ColumnParallelLinear: rows of the matrix, RowParallelLinear: columns, ParallelEmbedding: the width
or the words). Q and K keep Meta's names: there RoPE rotates neighbors, as in llama.cpp, but in
Hugging Face's layout the two halves of a head, so the converter reorders rows by those names.

For Llama 3's tokenizer, Meta stores the ranks of tiktoken: lines with a token's bytes in base64 and
its number. The names of special tokens are only in Meta's code (`models/llama3/tokenizer.py` in
llama-models, and its version for Llama 3.0).

Runs in the process of the converter. Nothing is unpickled but tensors, and tensors stay in the
mapped file until one is written.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.lab.importer.source import read_json

N_SPECIAL = 256
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""how the text is split before tokens are merged"""
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
Tensors = dict[str, Callable[[], torch.Tensor]]
"""name in the layout that the converter reads -> the function that joins the tensor"""

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_Q_AND_K = ("attention.wq.weight", "attention.wk.weight")
_COMPUTED = "rope.freqs"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SPLIT_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
_TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def read_ranks(path: Path) -> dict[bytes, int] | None:
    """The rank of each token, which is also its id; None if the file has another format."""
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
    """Their names, in the order of their ids after the last rank."""
    named = {0: _BEGIN, 1: _END, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
    if newer:
        named |= {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
    reserved = count()
    return [
        named.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(N_SPECIAL)
    ]


class MetaModel:
    """The shards of a folder in Meta's layout."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        """Opens the shards. Raises UsageError if one is damaged or would run code, if shards are
        missing, or if this module does not know the model."""
        self.folder = folder
        self.params = read_json(folder / "params.json")
        self.shards = [load_tensors(file) for file in files]
        self.n_heads = self._number("n_heads")
        self.n_kv_heads = self._number("n_kv_heads", self.n_heads)
        self.dim = self._number("dim")
        self.ranks = read_ranks(folder / "tokenizer.model")
        """for Llama 3; None for earlier models"""
        self.scales_rope = bool(self.params.get("use_scaled_rope"))
        self._check()

    def write_config(self, folder: Path) -> None:
        """Write the files that the converter reads besides tensors: configuration, tokenizer."""
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2))
        linked = ["README.md"]
        if self.ranks:
            write_tokenizer(self.ranks, self.scales_rope, folder)
        else:
            (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER, indent=2))
            linked.append("tokenizer.model")
        for name in linked:
            if (self.folder / name).is_file():
                (folder / name).symlink_to((self.folder / name).resolve())

    def config(self) -> dict[str, Any]:
        """What config.json of the Hugging Face folder says."""
        tensors = self.shards[0]
        eps = float(self.params.get("norm_eps", 1e-5))
        theta = float(self.params.get("rope_theta", 10000.0))
        begin, end = (len(self.ranks), len(self.ranks) + 1) if self.ranks else (1, 2)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": tensors["layers.0.feed_forward.w1.weight"].shape[0]
            * len(self.shards),
            "num_hidden_layers": self._number("n_layers"),
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.dim // self.n_heads,
            "vocab_size": self._joined("tok_embeddings.weight").shape[0],
            "max_position_embeddings": self._context(eps, theta),
            "rms_norm_eps": eps,
            "rope_theta": theta,
            "hidden_act": "silu",
            "bos_token_id": begin,
            "eos_token_id": end,
            "tie_word_embeddings": self._is_tied(),
            **({"rope_scaling": self._scaling()} if self.scales_rope else {}),
        }

    def _scaling(self) -> dict[str, Any]:
        """What Llama 3.1 and later do to low frequencies. params.json has no factor: it is 32 for
        3.2, whose text models have one matrix for embedding and output, and 8 for the others,
        as in transformers' models/llama/convert_llama_weights_to_hf.py."""
        return {
            "rope_type": "llama3",
            "factor": 32.0 if self._is_tied() else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    def tensors(self) -> Tensors:
        """All tensors in the order of Hugging Face's names. Raises UsageError for a name that no
        Llama has."""
        found: dict[str, str] = {}
        for name in self.shards[0]:
            if name == _COMPUTED or (name == "output.weight" and self._is_tied()):
                continue
            found[_renamed(name, self.folder)] = name
        return {
            name if name.endswith(_Q_AND_K) else renamed: partial(self._joined, name)
            for renamed, name in sorted(found.items())
        }

    def _joined(self, name: str) -> torch.Tensor:
        """A tensor, joined from its parts, as the converter's own lazy type, which computes when it
        is written."""
        from conversion import LazyTorchTensor

        parts: list[torch.Tensor] = [LazyTorchTensor.from_eager(of[name]) for of in self.shards]
        if len(parts) == 1 or parts[0].dim() == 1:
            return parts[0]
        split_columns = name.endswith(_SPLIT_COLUMNS)
        if name == "tok_embeddings.weight":
            # Llama 1 and 2 split the width, Llama 3 the words
            split_columns = parts[0].shape[1] != self.dim
        return torch.cat(parts, dim=int(split_columns))

    def _is_tied(self) -> bool:
        """Whether the output is the embedding."""
        if "output.weight" not in self.shards[0]:
            return True
        return all(
            shard["output.weight"].shape == shard["tok_embeddings.weight"].shape
            and torch.equal(shard["output.weight"], shard["tok_embeddings.weight"])
            for shard in self.shards
        )

    def _context(self, eps: float, theta: float) -> int:
        """Tokens of context, which params.json may lack: 131072 from Llama 3.1 on, 8192 for Llama
        3; 16384 for Code Llama, 4096 for Llama 2, 2048 for Llama 1, as in llama.cpp's
        examples/convert_legacy_llama.py."""
        if self.ranks:
            return self._number("max_seq_len", 131072 if self.scales_rope else 8192)
        if theta == 1e6:
            return self._number("max_seq_len", 16384)
        return self._number("max_seq_len", 4096 if eps == 1e-5 else 2048)

    def _number(self, key: str, default: int | None = None) -> int:
        found = self.params.get(key, default)
        if not isinstance(found, int) or found < 1:
            problem = "lacks" if found is None else "has an invalid"
            raise UsageError(f"{self.folder / 'params.json'} {problem} {key}")
        return found

    def _check(self) -> None:
        where = self.folder
        if self.params.get("moe") or self.params.get("vision_chunk_size"):
            raise UsageError(
                f"{where} is not a plain Llama; import the Hugging Face folder instead"
            )
        if self.dim % self.n_heads or self.n_heads % self.n_kv_heads:
            raise UsageError(f"{where / 'params.json'}: dim, n_heads and n_kv_heads do not match")
        wanted = {f"layers.{n}.{end}" for n in range(self._number("n_layers")) for end in _IN_LAYER}
        for shard in self.shards:
            lacking = sorted((wanted | {"tok_embeddings.weight", "norm.weight"}) - shard.keys())
            if lacking:
                raise UsageError(f"{where} has no tensor {lacking[0]}, which its params.json needs")
        if any(shard.keys() != self.shards[0].keys() for shard in self.shards):
            raise UsageError(f"{where}: the shards have different tensors")
        found = self.shards[0]["layers.0.attention.wq.weight"].shape[0] * len(self.shards)
        if found != self.dim:
            raise UsageError(
                f"{where}: {len(self.shards)} shards have {found} rows of Q instead of {self.dim}; "
                "are shards missing?"
            )
        words = self._joined("tok_embeddings.weight").shape[0]
        if self.ranks and words != len(self.ranks) + N_SPECIAL:
            raise UsageError(
                f"{where / 'tokenizer.model'} has {len(self.ranks)} tokens and {N_SPECIAL} special "
                f"ones, but the embedding has {words} rows"
            )
        if not self.ranks and not _is_sentencepiece(where / "tokenizer.model"):
            raise UsageError(
                f"{where / 'tokenizer.model'} is neither a SentencePiece model, as Llama 1 and 2 "
                "have, nor a list of ranks, as Llama 3 has"
            )


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a `.pth` file, mapped. Raises UsageError if it is damaged, or if it has
    anything but tensors, because unpickling that could run code."""
    try:
        found = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"names {named[1]}" if named else "is damaged, or has more than tensors"
        raise UsageError(
            f"{file} {what}: it was not unpickled, because that could run code"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {reason(error)}") from None
    except (RuntimeError, EOFError, ValueError) as error:
        raise UsageError(f"{file} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise UsageError(f"{file} does not contain tensors")
    return found


def _renamed(name: str, folder: Path) -> str:
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _IN_LAYER:
        return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}"
    if name in _TOP:
        return _TOP[name]
    raise UsageError(f"{folder} has a tensor {name}, which a plain Llama does not have")


def _is_sentencepiece(path: Path) -> bool:
    from sentencepiece import SentencePieceProcessor

    try:
        return bool(SentencePieceProcessor().Load(str(path)))
    except (RuntimeError, OSError):
        return False
