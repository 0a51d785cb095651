"""Benchmarks, run from a checkout: ``python -m bench.quantize``, ``python -m bench.linear``, ``python -m bench.check``."""
