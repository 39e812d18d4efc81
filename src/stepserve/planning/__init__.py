"""Planners, one a file: how many instances of which TP degree, and on which GPUs."""
