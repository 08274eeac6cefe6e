"""Each op beside ONNX Runtime, each layer beside transformers; the tensors of a run.

ONNX Runtime 1.32 sends usage data, and keeps it in a database below `~/.cache`. Its function
`disable_telemetry_events` does not stop that; only this variable does, if it is set before the
import.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"
