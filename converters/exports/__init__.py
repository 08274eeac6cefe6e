"""Logs for other tools: Perfetto, Chrome, PyTorch, OTLP, ONNX, flashinfer-bench, tables."""
