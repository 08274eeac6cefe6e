"""Reading a written file back into PyTorch."""

from pathlib import Path

import gguf
import numpy as np
import torch

from tools.demo_model.model import Llama
from tools.demo_model.shape import Shape


def read_model(path: Path) -> Llama:
    """Return the model that the demo model's file holds, computing in single precision."""
    model = Llama(Shape())
    tensors = gguf.GGUFReader(path).tensors
    model.load_state_dict(
        {tensor.name: torch.from_numpy(np.array(tensor.data, np.float32)) for tensor in tensors}
    )
    return model
