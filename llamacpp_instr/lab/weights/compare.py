"""The error of a model's weights against a reference model, tensor by tensor.

Invariant: memory is bounded however large the models are: `pieces` reads the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress, first_names
from llamacpp_instr.lab.weights.dequantize import Dequantizer, load_dequantizer
from llamacpp_instr.lab.weights.error import (
    ErrorSum,
    PieceError,
    WeightError,
    block_of,
    compute_percentiles,
    join_pieces,
    sample_stride,
)
from llamacpp_instr.lab.weights.pieces import PIECE, Files, Job, open_files, read_stored, work
from llamacpp_instr.llama.threads import usable_cpus
from llamacpp_instr.model.file import ModelFile, Weight

_TOKENS, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class _Pair:
    """A tensor of both models, and its bytes in both."""

    reference: Weight
    candidate: Weight
    reference_bytes: int
    n_bytes: int
    skipped: str


def compute_weight_errors(
    reference: ModelFile,
    candidate: ModelFile,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[WeightError]:
    """The error of every tensor of `candidate`, in its file's order.

    `threads` pieces are computed at once, by default one per CPU; the result does not depend on
    it. `on_progress` gets (bytes read, bytes to read).

    If only one model has an `output.weight`, it is compared with the other's token embedding,
    which llama.cpp then uses as the output; that embedding adds no bytes. A tensor of a type that
    the dequantizer cannot read has no numbers, and the reason in `skipped`.

    Raises `UsageError`, which names the tensor, if the models differ in architecture, tensors or
    shapes.
    """
    dequantizer = load_dequantizer()
    pairs = _match(reference, candidate, dequantizer)
    files = open_files([*reference.headers, *candidate.headers])
    jobs = [
        Job(
            pair.reference.n_bytes + pair.candidate.n_bytes,
            [partial(_piece, files, dequantizer, pair, start) for start in _starts(pair)],
            partial(_whole, pair),
        )
        for pair in pairs
    ]
    return list(work(jobs, threads or usable_cpus(), on_progress))


def _match(reference: ModelFile, candidate: ModelFile, dequantizer: Dequantizer) -> list[_Pair]:
    what = f"{candidate.path} and {reference.path} are not versions of the same model"
    if reference.architecture != candidate.architecture:
        raise UsageError(
            f"{what}: one's architecture is {candidate.architecture!r}, the other's "
            f"{reference.architecture!r}"
        )
    theirs, ours = _weights(reference, candidate), _weights(candidate, reference)
    only = [
        f"only {path} has {first_names(lone)}"
        for one, other, path in ((ours, theirs, candidate.path), (theirs, ours, reference.path))
        if (lone := [repr(name) for name in one if name not in other])
    ]
    if only:
        raise UsageError(f"{what}: {'; '.join(only)}")
    pairs = []
    for name, weight in ours.items():
        peer = theirs[name]
        if weight.ne != peer.ne:
            raise UsageError(
                f"{what}: tensor {name!r} has the shape {list(weight.ne)} in one, "
                f"{list(peer.ne)} in the other"
            )
        n_bytes = weight.n_bytes if name in candidate.by_name else 0
        reference_bytes = peer.n_bytes if name in reference.by_name else 0
        lacking = [type_ for type_ in (weight.type, peer.type) if not dequantizer.reads(type_)]
        skipped = f"{dequantizer.name} has no conversion of {lacking[0]}" if lacking else ""
        pairs.append(_Pair(peer, weight, reference_bytes, n_bytes, skipped))
    return pairs


def _weights(model: ModelFile, other: ModelFile) -> dict[str, Weight]:
    """The weights by name, with an output even if only the other model has one of its own."""
    weights = dict(model.by_name)
    if _TOKENS in weights and _OUTPUT not in weights and _OUTPUT in other.by_name:
        weights[_OUTPUT] = replace(weights[_TOKENS], name=_OUTPUT)
    return weights


def _starts(pair: _Pair) -> range:
    return range(0, 0 if pair.skipped else pair.candidate.n_elements, PIECE)


def _piece(files: Files, dequantizer: Dequantizer, pair: _Pair, start: int) -> PieceError:
    """The error of up to `PIECE` elements from `start` on."""
    reference, candidate, n_elements = pair.reference, pair.candidate, pair.candidate.n_elements
    row = candidate.ne[0] if candidate.ne else 1  # a number has no dimensions
    stride = sample_stride(n_elements, row)
    errors = ErrorSum(block_of(candidate.type), stride, start)
    end = min(start + PIECE, n_elements)
    for at in range(start, end, errors.x.size):
        n = min(errors.x.size, end - at)
        for weight, room in ((reference, errors.x), (candidate, errors.y)):
            data = read_stored(files, weight, at, at + n)
            list(dequantizer.fill(weight.type, data, n, room))
        errors.add(n)
    return errors.finish()


def _whole(pair: _Pair, pieces: list[PieceError]) -> WeightError:
    error = join_pieces(pieces)
    p50, p90, p99, p999 = compute_percentiles(error.sample)
    return WeightError(
        name=pair.candidate.name,
        layer=pair.candidate.layer,
        role=pair.candidate.role,
        reference_type=pair.reference.type,
        type=pair.candidate.type,
        n_elements=pair.candidate.n_elements,
        n_bytes=pair.n_bytes,
        reference_bytes=pair.reference_bytes,
        sums=error.sums,
        max_error=error.max_error,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        worst_block=error.worst_block,
        worst_block_rmse=error.worst_block_rmse,
        non_finite=error.non_finite,
        skipped=pair.skipped,
    )
