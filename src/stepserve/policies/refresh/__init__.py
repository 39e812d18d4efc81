"""Refresh policies, one a file."""
