"""The error of a model's weights against a reference model, tensor by tensor.

Invariant: memory is bounded however large the models are. Pieces of a tensor are read through a
map of the file and released afterwards, and only a few tensors are in progress at a time.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.threads import usable_cpus
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.weights.dequantize import Bytes, Dequantizer, load_dequantizer
from llamacpp_instr.weights.error import (
    ErrorSum,
    PieceError,
    WeightError,
    block_of,
    compute_percentiles,
    join_pieces,
    sample_stride,
)

PIECE = 1 << 22
"""elements that a thread processes in one task: whole chunks"""

_TOKENS, _OUTPUT = "token_embd.weight", "output.weight"
_NAMED = 3  # tensors named in a message


@dataclass(frozen=True)
class _Pair:
    """A tensor of both models, and its bytes in both."""

    reference: Weight
    candidate: Weight
    reference_bytes: int
    n_bytes: int
    skipped: str


@dataclass(frozen=True)
class _Work:
    """A tensor in progress: its pieces, then the whole."""

    n_bytes: int
    pieces: list[Future[PieceError]]
    whole: Future[WeightError]


def compute_weight_errors(
    reference: ModelFile,
    candidate: ModelFile,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
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
    threads = threads or usable_cpus()
    total = sum(pair.reference.n_bytes + pair.candidate.n_bytes for pair in pairs)
    done = 0
    errors = []
    with _maps([*reference.headers, *candidate.headers]) as maps, _pool(threads) as pool:
        for work in _begun(pool, maps, dequantizer, pairs, ahead=threads + 1):
            for i, piece in enumerate(work.pieces):
                piece.result()
                if on_progress:
                    on_progress(done + work.n_bytes * (i + 1) // len(work.pieces), total)
            done += work.n_bytes
            errors.append(work.whole.result())
    return errors


def _match(reference: ModelFile, candidate: ModelFile, dequantizer: Dequantizer) -> list[_Pair]:
    what = f"{candidate.path} and {reference.path} are not versions of the same model"
    if reference.architecture != candidate.architecture:
        raise UsageError(
            f"{what}: one's architecture is {candidate.architecture!r}, the other's "
            f"{reference.architecture!r}"
        )
    theirs, ours = _weights(reference, candidate), _weights(candidate, reference)
    for one, other, path in ((ours, theirs, candidate.path), (theirs, ours, reference.path)):
        lone = [name for name in one if name not in other]
        if lone:
            names = ", ".join(map(repr, lone[:_NAMED])) + ", …" * (len(lone) > _NAMED)
            count = f"{len(lone):,} tensors" if len(lone) > 1 else "tensor"
            raise UsageError(f"{what}: only {path} has the {count} {names}")
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


def _begun(
    pool: ThreadPoolExecutor,
    maps: Mapping[Path, mmap.mmap],
    dequantizer: Dequantizer,
    pairs: list[_Pair],
    ahead: int,
) -> Iterator[_Work]:
    """Tensors in order; `ahead` of them are started before the first is requested."""
    queue: deque[_Work] = deque()
    for pair in pairs:
        starts = range(0, 0 if pair.skipped else pair.candidate.n_elements, PIECE)
        pieces = [pool.submit(_piece, maps, dequantizer, pair, start) for start in starts]
        # waits for its pieces, which were submitted earlier, so that threads are at work on them
        whole = pool.submit(_whole, pair, pieces)
        n_bytes = pair.reference.n_bytes + pair.candidate.n_bytes
        queue.append(_Work(n_bytes, pieces, whole))
        if len(queue) > ahead:
            yield queue.popleft()
    yield from queue


def _piece(
    maps: Mapping[Path, mmap.mmap], dequantizer: Dequantizer, pair: _Pair, start: int
) -> PieceError:
    """The error of up to `PIECE` elements from `start` on."""
    reference, candidate, n_elements = pair.reference, pair.candidate, pair.candidate.n_elements
    row = candidate.ne[0] if candidate.ne else 1  # a number has no dimensions
    stride = sample_stride(n_elements, row)
    errors = ErrorSum(block_of(candidate.type), stride, start)
    end = min(start + PIECE, n_elements)
    with _stored(maps, reference, start, end) as x, _stored(maps, candidate, start, end) as y:
        references = dequantizer.fill(reference.type, x, end - start, errors.x)
        candidates = dequantizer.fill(candidate.type, y, end - start, errors.y)
        for n, _ in zip(references, candidates, strict=True):
            errors.add(n)
    return errors.finish()


def _whole(pair: _Pair, pieces: list[Future[PieceError]]) -> WeightError:
    error = join_pieces([piece.result() for piece in pieces])
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


@contextlib.contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that start no new task after the block ended with an error or Ctrl-C."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _maps(paths: list[Path]) -> Iterator[Mapping[Path, mmap.mmap]]:
    """The files as memory maps. They are unmapped with the last array that refers to them."""
    maps = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
    yield maps


@contextlib.contextmanager
def _stored(
    maps: Mapping[Path, mmap.mmap], weight: Weight, start: int, end: int
) -> Iterator[Bytes]:
    """The stored bytes of elements `start` to `end`; their pages are released afterwards."""
    mapped = maps[weight.path]
    begin = weight.offset + weight.type.row_bytes(start)
    size = weight.type.row_bytes(end - start)
    if begin + size > len(mapped):
        raise UsageError(f"{weight.path} became shorter while it was read")
    yield np.frombuffer(mapped, np.uint8, size, begin)
    if hasattr(mapped, "madvise"):  # not on Windows
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, page, begin + size - page)
