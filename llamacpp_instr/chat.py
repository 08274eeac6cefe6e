"""Puts a prompt into the model's own chat template."""

from __future__ import annotations

from .engine import Model
from .errors import UsageError


def render_chat(model: Model, prompt: str) -> str:
    """The text of a conversation in which the user has said `prompt` and the model is to answer.

    `Model.tokenize` is to be given the result: a BOS that the tokenizer adds is not in it.
    """
    template = model.chat_template()
    if not template:
        raise UsageError(f"{model.path} has no chat template; leave out --chat")
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        formatter = Jinja2ChatFormatter(template, eos_token=model.eos, bos_token=model.bos)
        text: str = formatter(messages=[{"role": "user", "content": prompt}]).prompt
    # the template is a program of the model's: it may fail in any way
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{model.path}: its chat template cannot be rendered: {reason}") from None
    if model.adds_bos and model.bos:
        text = text.removeprefix(model.bos)
    return text
