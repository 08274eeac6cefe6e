"""Train the demo model on stories of its grammar, and write it as GGUF.

python -m tools.train_demo_model -o llamacpp_instr/data/demo.gguf
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.grammar import stories
from tools.demo_model.model import Llama, Shape, write_gguf
from tools.demo_model.tokenizer import BOS, EOS, Tokenizer, learn_pieces

STORIES_FOR_PIECES = 4000
HELD_OUT_STORIES = 500

TOKENS_PER_STEP = 1024
# Most rows have a story or little more: they cost less and hold few names of other stories. The
# last quarter of the steps trains the whole context.
SHORT, LONG = 170, 512
RATE = 2e-3
WARM_UP_STEPS = 50

IGNORED = -100
"""a target without a loss: the default of functional.cross_entropy"""


def main() -> None:
    """Train a model and write it."""
    parser = argparse.ArgumentParser(description="Train the demo model and write it as GGUF.")
    parser.add_argument("-o", "--output", type=Path, default=Path("llamacpp_instr/data/demo.gguf"))
    parser.add_argument("--seed", type=int, default=1, help="seed of the stories and weights")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)

    shape = Shape()
    texts = (story.text for story in islice(stories(options.seed), STORIES_FOR_PIECES))
    tokenizer = Tokenizer(learn_pieces(texts, shape.vocabulary))
    model = Llama(shape, options.seed)
    train(model, token_lists(tokenizer, options.seed), options.steps)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(options.output, model, shape, tokenizer)
    print(f"wrote {options.output}: {options.output.stat().st_size} bytes")


def token_lists(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Yield the token ids of stories without end, except those that a test of the file reads."""
    held_out = {story.text for story in islice(stories(seed + 1), HELD_OUT_STORIES)}
    for story in stories(seed):
        if story.text not in held_out:
            yield [*tokenizer.encode(story.text), EOS]


def train(model: Llama, stories: Iterator[list[int]], steps: int) -> None:
    """Train the model in place."""
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.dim() == 2], "weight_decay": 0.1},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.9, 0.95),
    )
    started, seen = time.process_time(), 0
    for step in range(steps):
        length = SHORT if step < steps * 3 // 4 else LONG
        inputs, targets = batch(stories, TOKENS_PER_STEP // length, length)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        climb = (step + 1) / WARM_UP_STEPS
        descent = (steps - step) / max(1, steps - WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(climb, descent, 1.0)
        optimizer.step()
        seen += inputs.numel()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    print(f"trained on {seen} tokens in {time.process_time() - started:.0f} s of processor time")


def batch(stories: Iterator[list[int]], count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both [count, length]. A row begins with a story, is filled up with
    others, and is cut off."""
    rows = torch.empty((count, length + 1), dtype=torch.long)
    for row in rows:
        ids: list[int] = []
        while len(ids) <= length:
            ids += next(stories)
        row[:] = torch.tensor(ids[: length + 1])
    targets = rows[:, 1:].clone()
    targets[targets == BOS] = IGNORED  # nothing predicts which story follows
    return rows[:, :-1], targets


if __name__ == "__main__":
    main()
