"""Measurements as formulas, and their Prometheus form."""
