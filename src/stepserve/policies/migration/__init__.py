"""Migration policies, one a file."""
