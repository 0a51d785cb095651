"""Data for GEM: batch types, real and synthetic logs, a deterministic resumable loader.

    dataset = gem_model.data.load("ml-100k")
    for batch in Loader(dataset.train, batch_size=512, seed=0):
        ...

| name              | needs                                | streams   | tasks             | split                     |
|-------------------|--------------------------------------|-----------|-------------------|---------------------------|
| `ml-100k`         | `pip install --no-deps recbole==1.2.1`, or `path` | `ratings` | click, conversion | last 30 days |
| `ml-latest-small` | `path` of the CSV folder             | `ratings` | click, conversion | last 365 days             |
| `criteo`          | `path` of a TSV or CSV file          | none      | click             | last seventh of the rows  |
| `synthetic`       | nothing                              | `events`  | click, conversion | last fifth of the rows    |

The modules `ratings`, `criteo` and `synthetic` list the columns of each; docs/data.md says where the data comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gem_model.data.batching import (
    Batch,
    EventStream,
    JaggedTensor,
    KeyedJaggedTensor,
    Schema,
    SparseFeature,
    StreamSpec,
)
from gem_model.data.criteo import load_criteo
from gem_model.data.loader import Loader
from gem_model.data.movielens import load_ml_100k, load_ml_latest_small
from gem_model.data.source import Dataset, SampleSource
from gem_model.data.synthetic import load_synthetic

__all__ = [
    "DATASETS",
    "Batch",
    "Dataset",
    "EventStream",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "Loader",
    "SampleSource",
    "Schema",
    "SparseFeature",
    "StreamSpec",
    "load",
]

DATASETS: dict[str, Callable[..., Dataset]] = {
    "ml-100k": load_ml_100k,
    "ml-latest-small": load_ml_latest_small,
    "criteo": load_criteo,
    "synthetic": load_synthetic,
}


def load(name: str, **options: Any) -> Dataset:
    """Load a dataset by name; `options` are its loader's: `path`, and the fields of its options class.

    Raises ValueError for an unknown name or corrupt data (naming file and line), TypeError for an unknown option,
    FileNotFoundError for missing files.
    """
    if name not in DATASETS:
        raise ValueError(f"unknown dataset {name!r}; choose one of {sorted(DATASETS)}")
    return DATASETS[name](**options)
