"""Benchmarks: a case measures our code and its rivals in the same run; the harness computes the ratios."""
