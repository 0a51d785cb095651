"""Tiles that were timed on this machine, kept on disk between processes: what ``mxfp8 tune`` writes.

One JSON file, ``$MXFP8_CACHE_DIR/gemm_tiles.json`` (by default in ``$XDG_CACHE_HOME/mxfp8`` or ``~/.cache/mxfp8``)
with the tile and the number of parts of K of a product, for each GPU and Triton release. It is read once, when the
first product is planned. Without it, and for other products, the model of :func:`_gemm_tiles.choose` decides.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from pathlib import Path

import torch
import triton

__all__ = ["add", "find", "path", "product_key"]


def path() -> Path:
    """Where the file is."""
    folder = os.environ.get("MXFP8_CACHE_DIR")
    if folder:
        return Path(folder) / "gemm_tiles.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mxfp8" / "gemm_tiles.json"


def product_key(M: int, N: int, K: int, sides: int, pairs: bool) -> str:
    """``sides``: whether scales belong to rows, or to rows and columns; ``pairs``: whether they hold for 256 of K."""
    return f"{M}x{N}x{K} sides={sides} span={256 if pairs else 128}"


def find(key: str, device: int) -> tuple[str, int] | None:
    """The name of the tile and the number of parts of K for a product on a GPU, or None."""
    tables = _read(path())
    return tables.get(_machine(device), {}).get(key) if tables else None


def add(found: dict[str, tuple[str, int]], device: int) -> Path:
    """Add entries for a GPU to the file, which is replaced as a whole: other processes see the old or the new one."""
    file = path()
    _read.cache_clear()
    tables = {machine: dict(entries) for machine, entries in _read(file).items()}
    tables.setdefault(_machine(device), {}).update(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".json", delete=False, encoding="utf-8") as out:
        json.dump(tables, out, indent=1, sort_keys=True)
    os.replace(out.name, file)
    _read.cache_clear()
    return file


def _machine(device: int) -> str:
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


@functools.cache
def _read(file: Path) -> dict[str, dict[str, tuple[str, int]]]:
    """``{machine: {product: (tile, parts of K)}}``. A file that is not of that form is left out, with a warning."""
    if not file.exists():
        return {}
    try:
        tables = json.loads(file.read_text(encoding="utf-8"))
        return {
            machine: {key: (str(tile), _positive(split)) for key, (tile, split) in entries.items()}
            for machine, entries in tables.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is not used: {error}. Delete it, and run `mxfp8 tune` again", stacklevel=2)
        return {}


def _positive(n: object) -> int:
    if type(n) is not int or n < 1:
        raise ValueError(f"{n!r} is not a number of parts")
    return n
