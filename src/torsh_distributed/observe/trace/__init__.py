"""One timeline of all ranks: `event_files` reads, `rank_clocks` aligns, `timeline` draws, `trace_file` writes."""
