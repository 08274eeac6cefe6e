"""How well the model remembers: its loss on words that the story has said before."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from tools.demo_model.lexicon import ANIMALS, NAMES, PLACES, WORDS
from tools.demo_model.model import Llama
from tools.demo_model.tokenizer import SPACE, Tokenizer

_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "names": tuple(name.name for name in NAMES),
    "animals": ANIMALS,
    "places": tuple(place.noun for place in PLACES),
    "toys": WORDS["toy"],
    "colours": WORDS["colour"],
    "sad words": WORDS["sad"],
    "scared words": WORDS["scared"],
}


@torch.no_grad()
def recall_losses(
    model: Llama, tokenizer: Tokenizer, rows: Sequence[list[int]]
) -> dict[str, tuple[float, int]]:
    """Return the mean loss in nats on repeated words of each kind, and how many words that is.

    Only words of a single token count.
    """
    kinds = _kinds_of_tokens(tokenizer)
    losses: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        logits = model(torch.tensor([row[:-1]]))[0]
        each = functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none").tolist()
        for at, loss in enumerate(each, start=1):
            if row[at] in kinds and row[at] in row[:at]:
                losses[kinds[row[at]]].append(loss)
    return {kind: (sum(losses[kind]) / len(losses[kind]), len(losses[kind])) for kind in losses}


def _kinds_of_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    ids = {token: number for number, token in enumerate(tokenizer.tokens)}
    return {
        ids[SPACE + word]: kind
        for kind, words in _KINDS.items()
        for word in words
        if SPACE + word in ids
    }
