"""What DeepSpeed shows of a run: timers, monitors, the flops profiler; `engine_report` puts them together."""
