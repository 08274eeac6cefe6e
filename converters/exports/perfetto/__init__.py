"""A log as a Perfetto trace in its native form, protobuf."""

from llamacpp_instr.converters.exports.perfetto.stream import Options, write_perfetto

__all__ = ["Options", "write_perfetto"]
