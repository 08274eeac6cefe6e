"""A llama in plain PyTorch, its parameters named and laid out as in GGUF, and its GGUF file."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.tokenizer import BOS, EOS, Tokenizer


@dataclass(frozen=True)
class Shape:
    """The sizes of a small llama; every row of every matrix is a multiple of 256 long."""

    vocabulary: int = 1024
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    feed_forward: int = 768
    context: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


class Block(nn.Module):
    """One layer: attention with shared key-value heads, then a gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.sharing = shape.heads // shape.kv_heads
        q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(shape.width, q_size, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_size, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_size, bias=False)
        self.attn_output = nn.Linear(q_size, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Return the residual stream after this layer: [batch, time, width] like x."""
        normed = self.attn_norm(x)
        q = _rotate(self._heads(self.attn_q(normed)), rotations)
        k = _rotate(self._heads(self.attn_k(normed)), rotations)
        k = k.repeat_interleave(self.sharing, dim=1)
        v = self._heads(self.attn_v(normed)).repeat_interleave(self.sharing, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_output(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        out: Tensor = x + self.ffn_down(
            functional.silu(self.ffn_gate(normed)) * self.ffn_up(normed)
        )
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, heads, time, head_size] of [batch, time, heads * head_size]."""
        return x.reshape(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Llama(nn.Module):
    """The whole model, its matrices drawn from the seed.

    The tokens' rows have scale 1, and each product the scale of its input. With a scale of 0.02
    throughout, the model needs over four times as many tokens until it copies a name from earlier
    in the story.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._rotations = _rotations(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # two products of each layer are summed up in the residual stream
                summed = name.endswith(("attn_output.weight", "ffn_down.weight"))
                scale = (weight.shape[1] * (2 * shape.layers if summed else 1)) ** -0.5
                std = 1.0 if name == "token_embd.weight" else scale
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, time, vocabulary] for token ids [batch, time]."""
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, self._rotations)
        logits: Tensor = self.output(self.output_norm(x))
        return logits


def _rotations(shape: Shape) -> Tensor:
    """Return the rotations of RoPE as complex numbers: [context, head_size / 2]."""
    steps = torch.arange(0, shape.head_size, 2) / shape.head_size
    angles = torch.outer(torch.arange(shape.context), shape.rope_base**-steps)
    return torch.polar(torch.ones_like(angles), angles)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each adjacent pair (0, 1), (2, 3), ... of x: [batch, heads, time, head_size].

    These are the pairs of ggml's rope type NORM, so the export need not permute the weights.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[: x.shape[-2]]).flatten(-2)


NAME = "llamacpp-instr demo storyteller"
DESCRIPTION = (
    "A very small llama that writes little stories of a made-up grammar. "
    "It is made to be looked into, not to be useful."
)

# The last thing the user said is the beginning of the story.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(opening='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{%- set ns.opening = message['content'] -%}{%- endif -%}"
    "{%- endfor -%}"
    "{{- bos_token + ns.opening -}}"
)


def write_gguf(path: Path, model: Llama, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write the file: matrices in F16, the norms' gains in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)

    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(tokenizer.types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, weight in model.state_dict().items():
        writer.add_tensor(name, (weight.half() if weight.dim() == 2 else weight.float()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
