"""The validation suite of ``mxfp8``: tests for pytest, and the certificate of ``mxfp8 validate``."""
