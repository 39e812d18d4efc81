"""Policies: one class a file, each with its source and its options. They know core alone."""
