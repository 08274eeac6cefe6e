"""A llama in plain PyTorch, its parameters named and laid out as in GGUF."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


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
