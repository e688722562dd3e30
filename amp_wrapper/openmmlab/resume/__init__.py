"""Resuming a run of mmengine exactly: random states, the order of the data, preemption."""
