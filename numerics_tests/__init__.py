"""The validation suite of ``mxfp8``: run by pytest in a checkout and by ``mxfp8 validate`` on a user's GPU."""
