"""The contents of a model file: architecture, tokenizer, and weights by type, role and layer.

Invariant: read from the headers alone. Bytes are those of the file: weights, headers and padding
add up to its size, and the rows of every table to the weights.
"""

from __future__ import annotations

import math

from llamacpp_instr.converters.analyses.memory import compute_groups, stored_in_file
from llamacpp_instr.converters.analyses.tables import header, without
from llamacpp_instr.lab.quantize.plan import find_fallbacks, has_mixture
from llamacpp_instr.model.adapter import ALPHA, changed_weights, ranks_of
from llamacpp_instr.model.file import ModelFile, find_obstacles, kind_of, role_of
from llamacpp_instr.model.header import Scalar, quoted, read_array, read_items
from llamacpp_instr.model.hyper_parameters import find_contradictions
from llamacpp_instr.report.report import Cell, Report, shown

MOST_FALLBACKS = 20
FEW_ITEMS = 8
"""items of an array that are shown"""

LONG_TEXT = 200
"""characters of a text that are shown"""

NAMES = {
    "block_count": "layers",
    "context_length": "context length (tokens)",
    "embedding_length": "embedding width",
    "feed_forward_length": "feed-forward width",
    "vocab_size": "vocabulary (tokens)",
    "leading_dense_block_count": "dense layers before the experts",
    "expert_count": "experts",
    "expert_used_count": "experts used per token",
    "expert_shared_count": "experts shared by all tokens",
    "expert_feed_forward_length": "feed-forward width of an expert",
    "expert_shared_feed_forward_length": "feed-forward width of the shared experts",
    "expert_weights_scale": "scale of the experts' weights",
    "expert_weights_norm": "experts' weights normalized",
    "expert_gating_func": "gating function of the experts (number)",
    "use_parallel_residual": "attention and feed-forward in parallel",
    "pooling_type": "pooling (number)",
    "logit_scale": "scale of the logits",
    "attn_logit_softcapping": "soft cap of the attention's logits",
    "final_logit_softcapping": "soft cap of the logits",
    "attention.head_count": "attention heads",
    "attention.head_count_kv": "key and value heads",
    "attention.key_length": "width of a key head",
    "attention.value_length": "width of a value head",
    "attention.causal": "causal attention",
    "attention.layer_norm_epsilon": "epsilon of the layer norm",
    "attention.layer_norm_rms_epsilon": "epsilon of the RMS norm",
    "attention.sliding_window": "sliding window (tokens)",
    "attention.scale": "scale of the attention",
    "attention.q_lora_rank": "rank of the compressed query",
    "attention.kv_lora_rank": "rank of the compressed key and value",
    "attention.max_alibi_bias": "largest ALiBi bias",
    "attention.clamp_kqv": "clamp of query, key and value",
    "rope.dimension_count": "rotated dimensions (RoPE)",
    "rope.freq_base": "base frequency (RoPE)",
    "rope.scaling.type": "scaling (RoPE)",
    "rope.scaling.factor": "scaling factor (RoPE)",
    "rope.scaling.original_context_length": "context length before scaling (tokens)",
    "rope.scaling.finetuned": "trained with the scaling (RoPE)",
    "ssm.conv_kernel": "convolution kernel (SSM)",
    "ssm.inner_size": "inner width (SSM)",
    "ssm.state_size": "state width (SSM)",
    "ssm.time_step_rank": "rank of the time step (SSM)",
    "ssm.group_count": "groups (SSM)",
    "wkv.head_size": "width of a head (WKV)",
}
"""plain words for `ARCHITECTURE.key`; other keys are shown unchanged"""

_TOKENS = "tokenizer.ggml.tokens"


def compute_inspection(model: ModelFile) -> list[Report]:
    """The reports of `instr inspect`: the model, what an adapter changes, what a projector reads,
    its hyper-parameters, its tokenizer, its weights by type, role and layer, and fallbacks to other
    types. Parts that the file lacks are omitted. Sizes are in bytes; shares are from 0 to 1."""
    reports = [
        _model(model), _adapter(model), _projector(model), _hyper_parameters(model),
        _tokenizer(model), *_groups(model),
    ]  # fmt: skip
    return [report for report in reports if report.rows]


def list_tensors(model: ModelFile) -> Report:
    """Every weight in the order of the file, with the columns that fit a terminal."""
    return without(compute_tensors(model), "layer", "role", "offset", "part")


def compute_tensors(model: ModelFile) -> Report:
    """Every weight in the order of the file: type, shape (`ne`, the row's length first), elements,
    bytes, bits per weight, layer, role, file (a part, if the model is split), and offset in bytes
    from that file's start."""
    split = len(model.headers) > 1
    rows: list[list[Cell]] = [
        [
            weight.name, weight.type.name, " x ".join(map(str, weight.ne)), weight.n_elements,
            weight.n_bytes, weight.type.bits_per_weight, weight.layer, weight.role, weight.offset,
            weight.path.name if split else None,
        ]
        for weight in model.weights
    ]  # fmt: skip
    columns = header(
        "Tensor", "type", "shape", ("count", "elements"), ("bytes", "bytes"),
        ("bits", "bits/weight"), ("layer", "layer"), "role", ("count", "offset"), "part",
    )  # fmt: skip
    return Report("Tensors", columns, rows)


# --- the model ---


def _model(model: ModelFile) -> Report:
    headers = list(model.headers.values())
    kind = _scalar(kind_of(headers[0]))
    rows: list[list[Cell]] = [["file", str(model.path), None]]
    if kind != "model":
        rows.append(["kind", kind, "cannot run alone"])
    if len(headers) > 1:
        rows.append(["parts", len(headers), None])
    for what in ("name", "author", "license"):
        if (key := f"general.{what}") in model.metadata:
            rows.append([what, _scalar(model.metadata[key]), None])
    file_type = model.file_type
    if not file_type:
        number = model.metadata.get("general.file_type")
        file_type = "not stated" if number is None else f"unknown ({quoted(number)})"
    rows += [
        ["architecture", _cut(model.architecture), None],
        ["file type", file_type, None],
        ["tensors", len(model.weights), None if model.weights else "a vocabulary without weights"],
    ]
    if model.weights:
        head = sum(of.data_start for of in headers)
        bits = round(8 * model.n_bytes / model.n_elements, 4) if model.n_elements else None
        rows += [
            ["parameters", model.n_elements, None],
            ["bits per weight", bits, None],
            _bytes("bytes of the weights", model.n_bytes),
            _bytes("bytes of headers", head),
            _bytes("bytes of padding", model.file_size - head - model.n_bytes),
        ]
    rows += [_bytes("bytes in all", model.file_size), ["GGUF version", headers[0].version, None]]
    notes = [f"The header contradicts itself: {what}." for what in find_contradictions(model)]
    if kind == "model":
        why = [obstacle for of in headers for obstacle in find_obstacles(of)]
        notes += [f"llama.cpp cannot load this file: {obstacle}." for obstacle in why]
    if any(not weight.type.block_bytes for weight in model.weights):
        notes.append("The bytes of tensors of unknown types are counted as padding.")
    return Report("Model", header("fact", "value", "explained"), rows, notes, headed=False)


def _bytes(what: str, n: int) -> list[Cell]:
    return [what, n, shown(n, "bytes") if n >= 1024 else None]


def _optional_row(model: ModelFile, what: str, key: str) -> list[list[Cell]]:
    """A value of the metadata, or the length of an array, if the file has it."""
    if key in model.arrays:
        return [[what, model.arrays[key].count, None]]
    return [[what, _scalar(model.metadata[key]), None]] if key in model.metadata else []


def _hyper_parameters(model: ModelFile) -> Report:
    """The metadata of the architecture; an array is shown by its first items."""
    rows: list[list[Cell]] = []
    # keys of an adapter begin with `adapter`, those of a projector with its architecture
    for prefix in (f"{model.architecture}.", f"{model.metadata.get('general.type', 'model')}."):
        values = {key: _scalar(of) for key, of in model.metadata.items() if key.startswith(prefix)}
        for key, array in model.arrays.items():
            if key.startswith(prefix):
                items = map(_scalar, read_array(model.path, array, FEW_ITEMS))
                more = ", …" if array.count > FEW_ITEMS else ""
                values[key] = f"{array.count:,} values: {', '.join(map(str, items))}{more}"
        for key, value in values.items():
            short = _cut(key.removeprefix(prefix))
            rows.append([NAMES.get(short, short), value, short])
    return Report("Hyper-parameters", header("What", "value", "key"), rows)


def _adapter(model: ModelFile) -> Report:
    """What a LoRA adapter changes."""
    columns = header("fact", "value", "explained")
    changed = changed_weights(model)
    if not changed:
        return Report("Adapter", columns, [])
    ranks = ranks_of(model)
    alpha = model.metadata.get(ALPHA)
    factor = None
    if isinstance(alpha, float) and alpha and len(ranks) == 1:
        factor = f"adds {alpha / ranks[0]:g} times B A x, times the scale of the run"
    layers = {pair.layer for matrices in changed.values() for pair in matrices.values()}
    rows: list[list[Cell]] = [
        ["for models of", _cut(model.architecture), None],
        *_optional_row(model, "made for", "general.base_model.0.name"),
        ["rank", ", ".join(map(str, ranks)), None],
        *([*row[:2], factor] for row in _optional_row(model, "alpha", ALPHA)),
        ["weights changed", len(changed), ", ".join(sorted({role_of(name) for name in changed}))],
        ["layers changed", len(layers - {-1}), None],
    ]
    return Report("Adapter", columns, rows, headed=False)


def _projector(model: ModelFile) -> Report:
    """What a multimodal projector reads, and what it gives to its model."""
    rows: list[list[Cell]] = []
    for what, of in (("images", "vision"), ("audio", "audio")):
        if not model.metadata.get(f"clip.has_{of}_encoder"):
            continue
        rows.append(["reads", what, None])
        rows += _optional_row(model, "projector", "clip.projector_type")
        for fact, key in _OF_ENCODER.items():
            rows += _optional_row(model, fact, f"clip.{of}.{key}")
        size, patch = (model.metadata.get(f"clip.{of}.{key}_size") for key in ("image", "patch"))
        if isinstance(size, int) and isinstance(patch, int) and patch > 0:
            rows.append(["patches of an image", (size // patch) ** 2, "before the projector"])
    return Report("Projector", header("fact", "value", "explained"), rows, headed=False)


_OF_ENCODER = {
    "projector": "projector_type",
    "image size (pixels)": "image_size",
    "patch size (pixels)": "patch_size",
    "layers": "block_count",
    "embedding width": "embedding_length",
    "feed-forward width": "feed_forward_length",
    "attention heads": "attention.head_count",
    "width for the model": "projection_dim",
    "mel bins": "num_mel_bins",
}
"""plain words for `clip.vision.key` and `clip.audio.key`"""


def _scalar(value: Scalar) -> Cell:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        # the file has 32-bit floats: 1e-05, not 9.999999747378752e-06; JSON has no NaN
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return _cut(value) if isinstance(value, str) else value


def _cut(text: str) -> str:
    return text if len(text) <= LONG_TEXT else f"{text[:LONG_TEXT]}…"


def _tokenizer(model: ModelFile) -> Report:
    rows = [
        *_optional_row(model, "kind", "tokenizer.ggml.model"),
        *_optional_row(model, "splits text as", "tokenizer.ggml.pre"),
        *_optional_row(model, "tokens", _TOKENS),
        *_optional_row(model, "merges", "tokenizer.ggml.merges"),
        *_special_tokens(model),
        *_optional_row(model, "begins with bos", "tokenizer.ggml.add_bos_token"),
        *_optional_row(model, "ends with eos", "tokenizer.ggml.add_eos_token"),
    ]
    if rows:
        template = model.metadata.get("tokenizer.chat_template")
        length = f"{len(template):,} characters" if isinstance(template, str) else None
        rows.append(["chat template", "yes" if length else "no", length])
    return Report("Tokenizer", header("fact", "value", "explained"), rows, headed=False)


def _special_tokens(model: ModelFile) -> list[list[Cell]]:
    """Purpose, number and text of each."""
    numbers = {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
        for key, value in model.metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if isinstance(value, int)
    }
    tokens = model.arrays.get(_TOKENS)
    texts = read_items(model.path, tokens, numbers.values()) if tokens else {}
    lacking = "not in the vocabulary"
    return [
        [f"{_cut(name).replace('_', ' ')} token", number, _cut(str(texts.get(number, lacking)))]
        for name, number in numbers.items()
    ]


# --- the weights ---


def _groups(model: ModelFile) -> list[Report]:
    """By type, with the fallbacks to other types, by role and by layer."""
    groups = compute_groups(stored_in_file(model))
    types, *others = (without(report, "elements", "of F16", "of F32") for report in groups)
    fallbacks = find_fallbacks(model)
    if any(weight.type.is_quantized for weight in model.weights) and not fallbacks:
        none = "No tensor fell back to another type because of its row length."
        unknown = "The file type does not define a mixture, so fallbacks cannot be detected."
        types.notes.append(none if has_mixture(model) else unknown)
    rows: list[list[Cell]] = [
        [
            found.weight.name, found.weight.ne[0], " or ".join(of.name for of in found.wanted),
            found.weight.type.name, found.more_bytes,
        ]
        for found in fallbacks
    ]  # fmt: skip
    more = sum(found.more_bytes for found in fallbacks)
    notes = [
        f"{model.file_type} asks for types whose blocks do not divide these rows, so "
        f"llama-quantize used other types: {shown(more, 'bytes')} more.",
        "A type that was chosen by hand (--tensor-type) looks the same in the file.",
    ]
    title = "Types that fell back because of the row length"
    columns = header("Tensor", ("count", "row"), "wanted", "has", ("bytes", "more"))
    return [types, Report(title, columns, rows, notes, most=MOST_FALLBACKS), *others]
