"""The schedulers: pure functions of state, time and event."""
