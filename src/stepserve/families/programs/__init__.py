"""What a step is, per model family: the only place that knows the family."""
