"""Model architectures, each one a file."""
