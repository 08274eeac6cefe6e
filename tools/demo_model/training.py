"""The training loop and the held-out loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo_model.data import IGNORED, Rows, groups, padded
from tools.demo_model.model import Llama


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train."""

    steps: int
    tokens: int = 1024
    short: int = 170
    long: int = 512
    rate: float = 2e-3
    warm_up: int = 50
    decay: float = 0.1
    clip: float = 1.0

    def length_at(self, step: int) -> int:
        """Return the row length of a step: most of the time a story or little more.

        Short rows cost less and hold few names of other stories; the last quarter of the steps
        then trains the whole context.
        """
        return self.short if step < self.steps * 3 // 4 else self.long

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: a straight climb, then a straight descent to 0."""
        climb = (step + 1) / self.warm_up
        descent = (self.steps - step) / max(1, self.steps - self.warm_up)
        return self.rate * min(climb, descent, 1.0)


def train(model: Llama, rows: Rows, recipe: Recipe, log_every: int = 50) -> int:
    """Train the model in place and return how many tokens it has seen."""
    optimizer = _optimizer(model, recipe)
    seen = 0
    for step in range(recipe.steps):
        length = recipe.length_at(step)
        inputs, targets = rows.batch(recipe.tokens // length, length)
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        optimizer.step()
        seen += inputs.numel()
        if step % log_every == 0 or step == recipe.steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return seen


def _optimizer(model: Llama, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.decay},
            {"params": gains, "weight_decay": 0.0},
        ],
        lr=recipe.rate,
        betas=(0.9, 0.95),
    )


def loss_of(model: Llama, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats over the targets that count: a scalar."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: Llama, rows: list[list[int]]) -> float:
    """Return the mean loss in nats per token over whole stories, each read from its start."""
    total, count = 0.0, 0
    for group in groups(rows, 32):
        inputs, targets = padded(group)
        size = int((targets != IGNORED).sum())
        total += loss_of(model, inputs, targets).item() * size
        count += size
    return total / count
