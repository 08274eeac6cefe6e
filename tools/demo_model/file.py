"""The demo model as a GGUF file."""

from pathlib import Path

import gguf

from tools.demo_model.model import Llama, Shape
from tools.demo_model.tokenizer import BOS, EOS, Tokenizer

NAME = "llamacpp-instr demo storyteller"
DESCRIPTION = (
    "A very small llama that writes little stories of a made-up grammar. "
    "It is made to be looked into, not to be useful."
)

# The last thing the user said is the beginning of the story.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(opening='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{%- set ns.opening = message['content'] -%}{%- endif -%}"
    "{%- endfor -%}"
    "{{- bos_token + ns.opening -}}"
)


def write_gguf(path: Path, model: Llama, shape: Shape, tokenizer: Tokenizer) -> None:
    """Write the file: matrices in F16, the norms' gains in F32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)

    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_scores(tokenizer.scores)
    writer.add_token_types(tokenizer.types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, weight in model.state_dict().items():
        writer.add_tensor(name, (weight.half() if weight.dim() == 2 else weight.float()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
