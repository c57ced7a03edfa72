"""When to run: `allocation` plans workers over time, `forecast` has the time ahead, `run_times` the answer."""
