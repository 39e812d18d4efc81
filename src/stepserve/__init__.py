"""stepserve: serve diffusion and autoregressive language models under latency deadlines."""

__version__ = "0.4.0.dev0"
