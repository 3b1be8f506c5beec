"""Ray-distributed experiment runner for tiny Llama-style language models."""

__version__ = "0.1.0"
