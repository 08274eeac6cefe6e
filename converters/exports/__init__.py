"""Logs for other tools: Perfetto, Chrome, PyTorch, ONNX, flashinfer-bench, tables."""
