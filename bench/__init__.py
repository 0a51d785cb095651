"""Benchmarks, run from a checkout: ``python -m bench.quantize``, ``bench.linear``, ``bench.check``."""
