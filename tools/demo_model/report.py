"""Printing how good the model is, and how llama.cpp fares with its file."""

import math
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

from tools.demo_model import verify
from tools.demo_model.baseline import bigram_loss, unigram_loss
from tools.demo_model.consistency import faults
from tools.demo_model.data import held_out, tokens_of
from tools.demo_model.grammar import Story, stories
from tools.demo_model.lexicon import ANIMALS, NAMES, PLACES, WORDS
from tools.demo_model.model import Llama
from tools.demo_model.recall import recall_losses
from tools.demo_model.tokenizer import Tokenizer
from tools.demo_model.training import held_out_loss

HELD_OUT_STORIES = 500
STORIES_FOR_COUNTS = 10_000
PROMPTS = (
    "Once upon a time",
    "One day, a little fox",
    "Tom",
    "Mia was",
    "On a sunny morning,",
    "Long ago, there lived",
)
ODD_TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "line\nbreak\ttab",
    "1234 + 5 = x_y; {}[]<>|",
    "Zu\u0308rich \u2014 caf\u00e9 \u4e2d\u6587 \U0001f98a",
    "<s>not a token</s> <0x41> <unk>",
    "qqqq XYZZY onceuponatime ONCE",
)


def report(path: Path, model: Llama, tokenizer: Tokenizer, seed: int) -> None:
    """Print all there is to know about a written file and the model that it holds."""
    judged = held_out(seed, HELD_OUT_STORIES)
    _print_losses(model, tokenizer, judged, seed)
    if verify.can_verify():
        _print_verification(path, model, tokenizer, judged)
    else:
        print("llama_cpp is not installed: the comparison with llama.cpp was left out")


def _print_losses(model: Llama, tokenizer: Tokenizer, judged: list[Story], seed: int) -> None:
    """Print the held-out loss beside what bounds it from above and from below."""
    rows = [tokens_of(story, tokenizer) for story in judged]
    known = [tokens_of(story, tokenizer) for story in islice(stories(seed), STORIES_FOR_COUNTS)]
    tokens = sum(len(row) - 1 for row in rows)
    print(f"held out: {len(rows)} stories, {tokens} tokens; losses in nats per token")
    for name, loss in (
        ("unigram counts", unigram_loss(known, rows, len(tokenizer.tokens))),
        ("bigram counts", bigram_loss(known, rows, len(tokenizer.tokens))),
        ("model, as written", held_out_loss(model, rows)),
        ("the grammar's own choices", sum(story.nats for story in judged) / tokens),
    ):
        print(f"  {name:26s} {loss:.4f}  perplexity {math.exp(loss):.3f}")
    print("loss on words that the story has said before, in nats per word")
    for kind, (loss, count) in recall_losses(model, tokenizer, rows).items():
        print(f"  {kind:26s} {loss:.4f}  over {count}")


def _print_verification(
    path: Path, model: Llama, tokenizer: Tokenizer, judged: list[Story]
) -> None:
    """Print how the file fares in llama.cpp."""
    reference = verify.Reference(path, model.shape.context)
    print(f"llama.cpp: warnings while loading: {reference.warnings or 'none'}")
    texts = [*(story.text for story in judged), *PROMPTS, *ODD_TEXTS]
    differing = verify.differing_texts(reference, tokenizer, texts)
    print(f"llama.cpp: texts tokenized otherwise: {len(differing)} of {len(texts)} {differing}")
    rows = [tokens_of(story, tokenizer) for story in judged[:100]]
    difference = verify.logit_difference(reference, model, rows[:20])
    print(f"llama.cpp: largest difference of a logit over 20 stories: {difference:.5f}")
    theirs, ours = verify.reference_loss(reference, rows), held_out_loss(model, rows)
    print(f"llama.cpp: loss over {len(rows)} of the stories: {theirs:.4f}, PyTorch's: {ours:.4f}")
    _print_stories(reference)


def _print_stories(reference: verify.Reference) -> None:
    """Print some greedy stories, and how many of a greater number are without fault."""
    for prompt in PROMPTS:
        story, ended = reference.write(prompt)
        print(f"\n[{'ended' if ended else 'NOT ENDED'}] {story}")
    print(f"\n[chat: One day, a shy owl] {reference.chat('One day, a shy owl')}")
    written = [reference.write(prompt) for prompt in _openings()]
    endings = sum(came_to_end for _, came_to_end in written)
    found = Counter(fault for story, _ in written for fault in faults(story))
    sound = sum(not faults(story) for story, _ in written)
    print(f"\n{len(written)} greedy stories: {endings} ended, {sound} without fault")
    print(f"faults: {dict(found.most_common()) or 'none'}")


def _openings() -> list[str]:
    """Return a hundred openings or so, each of which asks for a different story."""
    named = [f"{name.name} was a" for name in NAMES]
    hobbies = [f"There once was a {trait}" for trait in WORDS["trait"] if trait[0] not in "aeiou"]
    animals = [
        f"One day, a {trait} {animal} named"
        for trait, animal in zip(cycle(("little", "brave", "shy")), ANIMALS, strict=False)
    ]
    places = [f"{place.preposition.capitalize()} the {place.noun}, there was" for place in PLACES]
    return [*named, *hobbies, *animals, *places]
