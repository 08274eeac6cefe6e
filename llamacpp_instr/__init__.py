"""llamacpp_instr: records what llama.cpp does while it thinks."""

__version__ = "0.1.0"
