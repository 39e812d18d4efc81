"""The step-level engine: runs batches of steps on a real model (PyTorch)."""
