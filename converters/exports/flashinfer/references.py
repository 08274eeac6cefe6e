"""The references of definitions: Python sources that compute an op with PyTorch, in float32.

Formulas are those of ggml/src/ggml-cpu/ops.cpp. A source begins with its constants (`with_values`).
"""

from __future__ import annotations


def with_values(source: str, **values: float | bool | list[float]) -> str:
    """The source of a module, below its constants."""
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    imports = ["import math"] if "math." in source else []
    head = "\n".join([*imports, "import torch", *([""] if lines else []), *lines])
    return f"{head}\n\n\n{source.strip()}\n"


GEMM = """
def run(A, B):
    return A.float() @ B.float().T
"""

BATCHED = """
def run(A, B):
    return A.float() @ B.float().transpose(1, 2)
"""

RMSNORM = """
def run({inputs}):
    x = {x}
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS){scaled}
"""

LAYERNORM = """
def run(hidden_states):
    x = hidden_states.float()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=EPS)
"""

ROWS = """
def run(indices, weight):
    return weight.float()[indices.long()]
"""

SOFTMAX = """
def run(x):
    return torch.softmax(x.float() * SCALE, dim=-1)
"""

TOPK = """
def run(x):
    return torch.topk(x.float(), K, dim=-1).indices.to(torch.int32)
"""

EXPERTS = """
def run(hidden_states, weights, expert_ids):
    # slot i of a token has its own activations, or all slots share them
    slots = expert_ids.shape[1]
    x = hidden_states.float().expand(-1, slots, -1)
    return torch.einsum("tsk,tsnk->tsn", x, weights[expert_ids.long()].float())
"""

ELEMENTWISE = """
def run(a, b):
    return a.float() {sign} b.float()
"""

UNARY = """
def run(x):
    x = x.float()
    return {function}
"""

GATED = """
def run(gate, up):
    x = gate.float()
    return {function} * up.float()
"""

FUNCTIONS = {
    "ABS": "x.abs()",
    "NEG": "-x",
    "TANH": "torch.tanh(x)",
    "ELU": "torch.nn.functional.elu(x)",
    "RELU": "torch.relu(x)",
    "SIGMOID": "torch.sigmoid(x)",
    "GELU": 'torch.nn.functional.gelu(x, approximate="tanh")',
    "GELU_ERF": "torch.nn.functional.gelu(x)",
    "GELU_QUICK": "x * torch.sigmoid(1.702 * x)",
    "SILU": "torch.nn.functional.silu(x)",
    "HARDSWISH": "torch.nn.functional.hardswish(x)",
    "HARDSIGMOID": "torch.nn.functional.hardsigmoid(x)",
    "EXP": "torch.exp(x)",
    "SOFTPLUS": "torch.nn.functional.softplus(x)",
}
"""by ggml's name"""

ROPE = """
def run(x, positions{factors}):
    # x is (tokens, heads, width); the first WIDTH of each head are turned
    pair = torch.arange(0, WIDTH, 2, dtype=torch.float64, device=x.device)
    turn = BASE ** (-pair / WIDTH){divided}
    slow = turn * SCALE
    # YaRN: RAMP is 0 where frequencies are interpolated, and EXT_FACTOR where they are kept
    ramp = torch.tensor(RAMP, dtype=torch.float64, device=x.device)
    angle = positions.double()[:, None] * (slow * (1 - ramp) + turn * ramp)
    cos = (torch.cos(angle) * MAGNITUDE).float()[:, None]
    sin = (torch.sin(angle) * MAGNITUDE).float()[:, None]
    part = x[..., :WIDTH].float()
    if NEOX:
        a, b = part[..., : WIDTH // 2], part[..., WIDTH // 2 :]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., WIDTH:].float()), dim=-1)
"""

SCORES = """
def capped(scores):
    return CAP * torch.tanh(scores / CAP) if CAP else scores


def weighted(scores, v{sinks}):
    # the log-sum-exp is to the base of two, as flashinfer has it
    {with_sinks}lse = torch.logsumexp(scores, dim=-1) / math.log(2)
    shares = torch.softmax(scores, dim=-1){without_sinks}
    return torch.einsum("hqn,nhd->qhd", shares, v), lse.T
"""

DECODE = """

def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale{sinks}):
    batch, heads, _ = q.shape
    k_rows, v_rows = k_cache.flatten(0, 1).float(), v_cache.flatten(0, 1).float()
    group = heads // k_rows.shape[1]
    output = torch.zeros(batch, heads, v_rows.shape[-1], device=q.device)
    lse = torch.full((batch, heads), -torch.inf, device=q.device)
    for i in range(batch):
        cells = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        k = k_rows[cells].repeat_interleave(group, dim=1)
        v = v_rows[cells].repeat_interleave(group, dim=1)
        scores = capped(torch.einsum("qhd,nhd->hqn", q[i : i + 1].float(), k) * sm_scale)
        output[i : i + 1], lse[i : i + 1] = weighted(scores, v{sinks})
    return output, lse
"""

PREFILL = """

def run(q, k, v, qo_indptr, kv_indptr, sm_scale{sinks}):
    heads = q.shape[1]
    group = heads // k.shape[1]
    output = torch.zeros(*q.shape[:2], v.shape[-1], device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for i in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
        cells = slice(int(kv_indptr[i]), int(kv_indptr[i + 1]))
        k_i = k[cells].float().repeat_interleave(group, dim=1)
        v_i = v[cells].float().repeat_interleave(group, dim=1)
        scores = capped(torch.einsum("qhd,nhd->hqn", q[rows].float(), k_i) * sm_scale)
        n_q, n_kv = scores.shape[1:]
        # the last query is at the last key
        query, key = (torch.arange(n, device=q.device) for n in (n_q, n_kv))
        back = query[:, None] + n_kv - n_q - key
        if CAUSAL:
            scores = scores.masked_fill(back < 0, -torch.inf)
        if WINDOW:
            scores = scores.masked_fill(back >= WINDOW, -torch.inf)
        output[rows], lse[rows] = weighted(scores, v_i{sinks})
    return output, lse
"""

MLA_DECODE = """
def run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    batch, heads, _ = q_nope.shape
    ckv, kpe = ckv_cache.flatten(0, 1).float(), kpe_cache.flatten(0, 1).float()
    output = torch.zeros(q_nope.shape, device=q_nope.device)
    lse = torch.full((batch, heads), -torch.inf, device=q_nope.device)
    for i in range(batch):
        cells = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        scores = q_nope[i].float() @ ckv[cells].T + q_pe[i].float() @ kpe[cells].T
        scores = scores * sm_scale
        # the log-sum-exp is to the base of two, as flashinfer has it
        lse[i] = torch.logsumexp(scores, dim=-1) / math.log(2)
        output[i] = torch.softmax(scores, dim=-1) @ ckv[cells]
    return output, lse
"""
