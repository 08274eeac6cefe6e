"""Measure a demo model that is already written: its losses, and llama.cpp's view of it.

python -m tools.check_demo_model llamacpp_instr/data/demo.gguf
"""

import argparse
from pathlib import Path

import torch

from tools.demo_model.load import read_model
from tools.demo_model.report import report
from tools.demo_model.stored import read_tokenizer


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Measure a demo model that is already written.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="that the model was trained with")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report(options.file, read_model(options.file), read_tokenizer(options.file), options.seed)


if __name__ == "__main__":
    main()
