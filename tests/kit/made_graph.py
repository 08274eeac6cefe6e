"""The weights and the nodes of a small Llama, as in its graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Row:
    """A node; negative sources are leafs: the weights, then the tokens, then a cache."""

    name: str
    op: str
    layer: int
    src: list[int]
    executed: int = 1
    params: tuple[int, ...] = ()


def llama_weights(n_layers: int) -> list[str]:
    weights = ["token_embd.weight"]
    for il in range(n_layers):
        parts = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
        weights += [f"blk.{il}.{part}.weight" for part in parts.split()]
    return [*weights, "output_norm.weight", "output.weight"]


def llama_rows(weights: list[str], n_layers: int) -> list[Row]:
    """The nodes of a Llama; negative sources are leafs: the weights, then the inputs."""
    weight = {name: -1 - i for i, name in enumerate(weights)}
    tokens, cache = -1 - len(weights), -2 - len(weights)
    rows = [Row("inp_embd", "GET_ROWS", -1, [weight["token_embd.weight"], tokens])]

    def add(name: str, op: str, il: int, *src: int, executed: int = 1) -> int:
        rows.append(Row(name, op, il, list(src), executed))
        return len(rows) - 1

    x = 0
    for il in range(n_layers):
        w = {n.split(".")[2]: i for n, i in weight.items() if n.startswith(f"blk.{il}.")}
        h = add(f"norm-{il}", "RMS_NORM", il, x)
        h = add(f"attn_norm-{il}", "MUL", il, h, w["attn_norm"])
        q = add(f"Qcur-{il}", "MUL_MAT", il, w["attn_q"], h)
        q = add(f"Qcur-{il}", "ROPE", il, q)
        k = add(f"Kcur-{il}", "MUL_MAT", il, w["attn_k"], h)
        k = add(f"cache_k_l{il}", "SET_ROWS", il, k, cache)
        v = add(f"cache_v_l{il} (view)", "VIEW", il, cache, executed=0)
        h = add(f"node_{len(rows)}", "FLASH_ATTN_EXT", il, q, k, v)
        h = add(f"attn_out-{il}", "MUL_MAT", il, w["attn_output"], h)
        x = add(f"ffn_inp-{il}", "ADD", il, h, x)
        h = add(f"norm-{il}", "RMS_NORM", il, x)
        h = add(f"ffn_norm-{il}", "MUL", il, h, w["ffn_norm"])
        g = add(f"ffn_gate-{il}", "MUL_MAT", il, w["ffn_gate"], h)
        u = add(f"ffn_up-{il}", "MUL_MAT", il, w["ffn_up"], h)
        g = add(f"ffn_swiglu-{il}", "GLU", il, g, u)
        h = add(f"ffn_out-{il}", "MUL_MAT", il, w["ffn_down"], g)
        x = add(f"l_out-{il}", "ADD", il, h, x)
    x = add("norm", "RMS_NORM", -1, x)
    x = add("result_norm", "MUL", -1, x, weight["output_norm.weight"])
    add("result_output", "MUL_MAT", -1, weight["output.weight"], x)
    return rows
