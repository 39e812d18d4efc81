"""The model that ships with the package: its tasks, its training recipe and its evaluation."""
