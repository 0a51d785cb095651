"""Tests of the portable kernels that run in Triton's interpreter; ``test_interpreter.py`` starts them."""
