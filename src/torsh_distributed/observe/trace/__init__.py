"""One timeline of all ranks: `event_files` reads and aligns clocks, `timeline` draws, `trace_file` writes."""
