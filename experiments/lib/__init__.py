"""Results of experiments: reading, choosing, averaging over seeds, tables and figures."""
