"""Threshold policies, one a file."""
