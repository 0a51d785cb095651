"""Faults planted one at a time in a copy of the tree: proof that the tests can fail.

``python -m numerics_tests.mutation`` runs, for each fault of :mod:`numerics_tests.mutation.faults`, the tests that are
said to catch it, and fails if one of them passes. docs/mutations.md is the table it writes.
"""
