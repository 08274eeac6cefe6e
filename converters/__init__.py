"""Turns logs into reports, traces and tables; needs no compiler, model or llama_cpp."""
