"""Deterministic, resumable batches from a `SampleSource`.

The order of an epoch depends on (seed, epoch) alone: it is the stable argsort of raw PCG64 output, a stream that numpy
promises to keep across releases (it makes no such promise for `permutation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gem_model.data.batching import Batch
from gem_model.data.source import IntArray, SampleSource

StateValue = int | bool


class Loader:
    """Iterable over one epoch of batches; every `iter()` after a full pass is the next epoch.

    Iterating again after leaving an epoch early goes on where it stopped, also in another process after
    `load_state_dict`. The position counts a batch as soon as it is handed out.
    """

    def __init__(
        self, source: SampleSource, batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        """Raises ValueError when `batch_size` < 1, `seed` < 0, or the source cannot fill one batch."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        needed = batch_size if drop_last else 1
        if len(source) < needed:
            raise ValueError(f"the source has {len(source)} samples, at least {needed} needed (drop_last={drop_last})")
        self.source = source
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(len(self.source), self.batch_size)
        return full + int(rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        order = self._order()
        while self.position < len(self):
            start = self.position * self.batch_size
            batch = self.source.take(order[start : start + self.batch_size]).validate(self.source.schema)
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, StateValue]:
        """Position (epoch, batches handed out in it) and the settings that fix the order."""
        return {"epoch": self.epoch, "position": self.position, **self._settings()}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go to a saved position. ValueError, with nothing changed, when the settings differ or the position is off."""
        expected = {"epoch", "position", *self._settings()}
        if set(state) != expected:
            raise ValueError(f"loader state has keys {sorted(state)}, expected {sorted(expected)}")
        for name, own in self._settings().items():
            if state[name] != own:
                raise ValueError(
                    f"loader state was saved with {name}={state[name]}, this loader has {name}={own}; "
                    f"build it with the saved value to get the same batches"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self):
            raise ValueError(f"loader state: epoch {epoch}, position {position} outside [0, {len(self)}] batches")
        self.epoch, self.position = epoch, position

    def _settings(self) -> dict[str, StateValue]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_samples": len(self.source),
        }

    def _order(self) -> IntArray:
        if not self.shuffle:
            return np.arange(len(self.source), dtype=np.int64)
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch])).random_raw(len(self.source))
        return np.argsort(raw, kind="stable").astype(np.int64)
