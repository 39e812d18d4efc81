"""stepserve: serve diffusion and autoregressive language models under latency deadlines."""

__version__ = "0.2.0"
