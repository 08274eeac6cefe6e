"""Train the demo model from nothing and write it as GGUF.

python -m tools.train_demo_model -o llamacpp_instr/data/demo.gguf
"""

import argparse
import time
from itertools import islice
from pathlib import Path

import torch

from tools.demo_model.data import Rows, held_out
from tools.demo_model.export import round_to_half, write_gguf
from tools.demo_model.grammar import stories
from tools.demo_model.model import Llama, initialize
from tools.demo_model.pieces import learn_pieces
from tools.demo_model.report import HELD_OUT_STORIES, report
from tools.demo_model.shape import Shape
from tools.demo_model.tokenizer import FIRST_BYTE, Tokenizer
from tools.demo_model.training import Recipe, train

STORIES_FOR_PIECES = 4000


def main() -> None:
    """Run the command."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    shape = Shape()
    tokenizer = _tokenizer(options.seed, shape)
    model = Llama(shape)
    initialize(model, options.seed)
    _train(model, tokenizer, options.seed, Recipe(options.steps))
    round_to_half(model)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(options.output, model, tokenizer)
    print(f"wrote {options.output}: {options.output.stat().st_size} bytes")
    report(options.output, model, tokenizer, options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model and write it as GGUF.")
    parser.add_argument("-o", "--output", type=Path, default=Path("llamacpp_instr/data/demo.gguf"))
    parser.add_argument("--seed", type=int, default=1, help="of the stories and the weights")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    return parser.parse_args()


def _tokenizer(seed: int, shape: Shape) -> Tokenizer:
    texts = (story.text for story in islice(stories(seed), STORIES_FOR_PIECES))
    return Tokenizer(learn_pieces(texts, shape.vocabulary - FIRST_BYTE - 256))


def _train(model: Llama, tokenizer: Tokenizer, seed: int, recipe: Recipe) -> None:
    """Train the model in place on stories that are not held out."""
    forbidden = {story.text for story in held_out(seed, HELD_OUT_STORIES)}
    started = time.process_time()
    seen = train(model, Rows(tokenizer, seed, forbidden), recipe)
    spent = time.process_time() - started
    print(f"trained on {seen} tokens in {spent:.0f} s of processor time; {recipe}")


if __name__ == "__main__":
    main()
