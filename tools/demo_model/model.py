"""A llama in plain PyTorch, its parameters named and laid out as in GGUF."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.shape import Shape


def rope_table(shape: Shape) -> Tensor:
    """Return the rotations as complex numbers: [context, head_size / 2]."""
    steps = torch.arange(0, shape.head_size, 2) / shape.head_size
    angles = torch.outer(torch.arange(shape.context), shape.rope_base**-steps)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each adjacent pair (0, 1), (2, 3), ... of x: [batch, heads, time, head_size].

    These are the pairs of ggml's rope type NORM, so the weights need no permutation on export.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[: x.shape[-2]]).flatten(-2)


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

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the residual stream after this layer: [batch, time, width] like x."""
        x = x + self._attend(self.attn_norm(x), table)
        return x + self._feed_forward(self.ffn_norm(x))

    def _attend(self, x: Tensor, table: Tensor) -> Tensor:
        q = rotate(self._heads(self.attn_q(x)), table)
        k = rotate(self._heads(self.attn_k(x)), table).repeat_interleave(self.sharing, dim=1)
        v = self._heads(self.attn_v(x)).repeat_interleave(self.sharing, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.attn_output(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """Return [batch, heads, time, head_size] of [batch, time, heads * head_size]."""
        return x.reshape(*x.shape[:2], -1, self.head_size).transpose(1, 2)

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ffn_down(functional.silu(self.ffn_gate(x)) * self.ffn_up(x))
        return out


class Llama(nn.Module):
    """The whole model."""

    rope: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("rope", rope_table(shape), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, time, vocabulary] for token ids [batch, time]."""
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, self.rope)
        logits: Tensor = self.output(self.output_norm(x))
        return logits


def initialize(model: Llama, seed: int) -> None:
    """Draw every matrix anew, each row of tokens at scale 1 and each product at its input's scale.

    With a scale of 0.02 throughout, copying a name from earlier in the story was still not learned
    after 1.4 million tokens; so it is well under way after 300 thousand.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=_scale(name, weight, model.shape), generator=generator)


def _scale(name: str, weight: Tensor, shape: Shape) -> float:
    if name == "token_embd.weight":
        return 1.0
    # What writes to the residual stream is summed up over two writers in each layer.
    writes = name.endswith(("attn_output.weight", "ffn_down.weight"))
    summands = 2 * shape.layers if writes else 1
    return float((weight.shape[1] * summands) ** -0.5)
