"""Model families as values, and the assembly of schedulers from configuration."""
