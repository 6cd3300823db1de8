"""Measuring and running: the profiler, the executor, and training under a plan."""
