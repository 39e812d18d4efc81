"""Placement policies, one a file."""
