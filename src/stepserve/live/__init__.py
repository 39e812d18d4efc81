"""The real world: clock, threads, executors, transports."""
