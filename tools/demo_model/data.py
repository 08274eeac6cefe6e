"""Stories as the rows of token ids that the model is trained and judged on."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from tools.demo_model.grammar import Story, stories
from tools.demo_model.tokenizer import BOS, EOS, Tokenizer

# What cross-entropy leaves out by default.
IGNORED = -100


def tokens_of(story: Story, tokenizer: Tokenizer) -> list[int]:
    """Return the story's token ids, from the beginning-of-sequence to the end-of-sequence."""
    return [*tokenizer.encode(story.text), EOS]


def held_out(seed: int, count: int) -> list[Story]:
    """Return ``count`` stories of a stream of their own, which training never draws from."""
    return list(islice(stories(seed + 1), count))


class Rows:
    """Training rows, each beginning with a whole story and cut off at its length."""

    def __init__(self, tokenizer: Tokenizer, seed: int, forbidden: set[str]) -> None:
        self._tokenizer = tokenizer
        self._stories = (story for story in stories(seed) if story.text not in forbidden)

    def batch(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both [count, length]."""
        rows = torch.tensor([self._row(length) for _ in range(count)])
        targets = rows[:, 1:].clone()
        # Which story follows the end of one is nobody's to predict.
        targets[targets == BOS] = IGNORED
        return rows[:, :-1], targets

    def _row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) <= length:
            row += tokens_of(next(self._stories), self._tokenizer)
        return row[: length + 1]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both [rows, longest - 1], the padding's targets left out."""
    longest = max(map(len, rows))
    inputs = torch.full((len(rows), longest - 1), EOS)
    targets = torch.full((len(rows), longest - 1), IGNORED)
    for at, row in enumerate(rows):
        inputs[at, : len(row) - 1] = torch.tensor(row[:-1])
        targets[at, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, targets


def groups(rows: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Yield the rows in groups of ``size``, the last one perhaps smaller."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
