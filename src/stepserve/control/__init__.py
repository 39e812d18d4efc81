"""The schedulers and their policies: functions of state, time and event. Pure."""
