"""Compares a model with the folder that it was imported from."""

from __future__ import annotations

from llamacpp_instr.errors import UsageError
from llamacpp_instr.importer.source import Source
from llamacpp_instr.llama.engine import LoadedModel
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.validate.against.compare import Comparison, compare
from llamacpp_instr.validate.against.ours import compute_states
from llamacpp_instr.validate.against.theirs import Sizes, transformers_states
from llamacpp_instr.validate.prompt import check_only_decodes, prompt_tokens


def compare_with_transformers(
    file: ModelFile,
    source: Source,
    prompt: str | None,
    threads: int | None,
    flash_attn: str,
    log: LlamaLog,
    on_progress: OnProgress,
) -> Comparison:
    """The states of one prefill, of llama.cpp and of transformers, on the same tokens.

    Raises UsageError for a model that does not only decode, that has no residual stream, or that
    is not the folder's, and for a folder that transformers cannot load.
    """
    key = f"{file.architecture}.attention.causal"
    if not file.metadata.get(key, True):
        raise UsageError(f"{file.path} is an encoder; models that only decode can be validated")
    with LoadedModel(file.path, log) as model:
        check_only_decodes(model)
        tokens = prompt_tokens(model, prompt)
        sizes = Sizes(
            str(file.path),
            int(model.api.llama_model_n_layer(model.handle)),
            int(model.api.llama_model_n_embd(model.handle)),
            model.n_vocab,
        )
        # it refuses what does not fit; the file's pages are not read before it has ended
        theirs = transformers_states(source, sizes, tokens, threads, on_progress)
        ours = compute_states(model, tokens, threads, flash_attn)
    return compare(ours.values, theirs, ours.nodes)
