"""A log as a trace in Chrome's JSON format."""

from llamacpp_instr.converters.exports.chrome.stream import write_chrome

__all__ = ["write_chrome"]
