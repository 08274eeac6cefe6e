"""A graph of llama.cpp as a standard ONNX graph."""
