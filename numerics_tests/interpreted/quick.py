"""A pytest plugin for interpreted processes: half of their time, and the same bits.

Triton's interpreter replaces the functions of ``triton.language`` by its own at every call of a device function,
although the launch around it has done so: a third of the time. Here a launch does it once for each module whose
functions it calls. And the garbage collector leaves alone what was there when the tests were collected.
"""

import gc

import pytest
import triton
from triton.runtime import interpreter


def patch_once() -> None:
    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def launched(self, *args, **kwargs):
        patched.clear()  # the end of a launch puts back what its start has replaced
        return launch(self, *args, **kwargs)

    def called(self, *args, **kwargs):
        module = self.fn.__globals__
        if id(module) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(module))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def pytest_configure(config: pytest.Config) -> None:
    if triton.__version__.startswith("3.6."):  # others may do it differently: slower there, and right
        patch_once()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
