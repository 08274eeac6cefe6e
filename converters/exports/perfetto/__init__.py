"""A log as a Perfetto trace in its native form, protobuf."""

from llamacpp_instr.converters.exports.perfetto.stream import write_perfetto
from llamacpp_instr.converters.exports.traced import Options

__all__ = ["Options", "write_perfetto"]
