"""Caps policies, one a file."""
