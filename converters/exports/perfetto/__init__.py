"""A log as a Perfetto trace in its native form, protobuf."""

from converters.exports.perfetto.stream import Options, Written, write_perfetto

__all__ = ["Options", "Written", "write_perfetto"]
