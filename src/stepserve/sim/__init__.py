"""The simulated world. So far: workloads, which the load generator shares."""
