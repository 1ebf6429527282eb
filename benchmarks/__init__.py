"""Benchmarks, one file an engine: ratios to something known, measured in one interleaved run."""
