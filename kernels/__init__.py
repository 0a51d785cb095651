"""GPU kernels: plain tensors in, plain tensors out. Installed as ``mxfp8.kernels``.

One file per op and backend, ``<op>_<backend>.py``, so that listing this folder is the op x backend matrix; a missing
file is an empty cell and never a stub. Every op already has its exact meaning in ``mxfp8/reference``; a kernel file is
added when it beats that.

A kernel file imports torch, triton and its neighbours here, by relative import, and nothing of ``mxfp8``. It is
imported lazily and by name, from ``mxfp8/dispatch.py`` alone. This file imports nothing, so ``import mxfp8.kernels``
works without triton and without a GPU.
"""
