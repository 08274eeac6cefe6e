"""What models that only count would lose on the same text."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

Rows = Iterable[list[int]]


def unigram_loss(training: Rows, judged: Rows, vocabulary: int) -> float:
    """Return the nats per token of counts of single tokens, one added to each."""
    counts = Counter(token for row in training for token in row[1:])
    total = counts.total() + vocabulary
    return _mean(-math.log((counts[token] + 1) / total) for row in judged for token in row[1:])


def bigram_loss(training: Rows, judged: Rows, vocabulary: int) -> float:
    """Return the nats per token of counts of token pairs, a hundredth added to each."""
    rows = list(training)
    pairs = Counter(pair for row in rows for pair in pairwise(row))
    firsts = Counter(token for row in rows for token in row[:-1])
    extra = 0.01
    return _mean(
        -math.log((pairs[pair] + extra) / (firsts[pair[0]] + extra * vocabulary))
        for row in judged
        for pair in pairwise(row)
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
