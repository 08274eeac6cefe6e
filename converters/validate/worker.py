"""The child process in which transformers runs (`against` starts it), and the names of states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.base.child import Answer, Request, serve
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.lab.importer.worker import check_pickles, run_no_code_of_the_folder

EMBEDDINGS = "embeddings"
FINAL_NORM = "final norm"
LOGITS = "logits"


def layer(number: int) -> str:
    """The state after a layer."""
    return f"layer {number}"


def main() -> None:
    serve(_compute, lambda request: shutil.rmtree(request["staging"], ignore_errors=True))


def _compute(request: Request, answer: Answer) -> list[str]:
    """Writes the states to files; returns their names."""
    import torch
    import transformers

    run_no_code_of_the_folder()
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    folder = request["folder"]
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    check_sizes(folder, config.get_text_config(), request["sizes"])
    check_pickles([Path(name) for name in request["weights"]])
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager",
        local_files_only=True, output_loading_info=True,
    )  # fmt: skip
    if lacking := sorted(report["missing_keys"]):  # transformers made these up
        raise UsageError(f"{folder} lacks weights: {first_names(lacking)}")
    states = _states(model.eval(), request["tokens"], request["sizes"]["n_layers"], answer)
    for name, values in states.items():
        np.save(Path(request["staging"]) / f"{name}.npy", values[0].float().numpy())
    return list(states)


def check_sizes(folder: str, config: Any, ours: dict[str, Any]) -> None:
    """Raises UsageError if the models differ in what can be seen before weights are loaded."""
    names = {
        "n_layers": ("num_hidden_layers", "layers"),
        "width": ("hidden_size", "values in a hidden state"),
        "n_vocab": ("vocab_size", "tokens in its vocabulary"),
    }
    for key, (theirs, what) in names.items():
        found = getattr(config, theirs, None)
        if found != ours[key]:
            raise UsageError(
                f"{ours['path']} has {ours[key]:,} {what}, but {folder} has "
                f"{'none' if found is None else f'{found:,}'}: they are not the same model"
            )


def _states(model: Any, tokens: list[int], n_layers: int, answer: Answer) -> dict[str, Any]:
    """The states with a batch of one. transformers returns the last one only after the final norm,
    so the one before the norm is taken from the last layer."""
    import torch

    # the outermost list of `n_layers` modules
    lists = (of for of in model.modules() if isinstance(of, torch.nn.ModuleList))
    layers: Any = next((of for of in lists if len(of) == n_layers), ())
    before_norm: list[Any] = []
    for number, module in enumerate(layers):

        def passed(_module: Any, _inputs: Any, output: Any, number: int = number) -> None:
            answer("progress", number + 1, n_layers)
            if number == n_layers - 1:
                before_norm.append(output[0] if isinstance(output, tuple) else output)

        module.register_forward_hook(passed)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        found = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True,
            use_cache=False,
        )  # fmt: skip
    first, *inner, last = found.hidden_states
    if len(inner) != n_layers - 1:
        raise UsageError(
            f"transformers returns {len(inner) + 2} hidden states of this architecture, which has "
            f"{n_layers} layers; they cannot be told apart"
        )
    states = {EMBEDDINGS: first}
    states |= {layer(number): values for number, values in enumerate([*inner, *before_norm])}
    return {**states, FINAL_NORM: last, LOGITS: found.logits}
