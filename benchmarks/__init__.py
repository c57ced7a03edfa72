"""Benchmarks: every case measures ours and its rivals in the same run, and the harness computes the ratios."""
