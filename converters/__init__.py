"""Logs in, things to look at out: nothing here needs a compiler, a model or llama_cpp."""
