"""Criteo reader: transforms and hashes by value, both layouts equal, and corrupt lines named."""

from pathlib import Path

import numpy as np
import pytest

from gem_model.data import Dataset, load
from gem_model.data.criteo import CSV_HEADER, hash_categories

MASK = (1 << 64) - 1


def row(label: str = "1", counts: str = "3", category: str = "05db9164", blank: bool = False) -> list[str]:
    fields = [label] + [counts] * 13 + [category] * 26
    if blank:
        fields[2] = fields[20] = ""
    return fields


ROWS = [row("0"), row("1", "-2"), row("1", "0", blank=True), row("0", "17", "ffffffff"), row("1"), row("0")]


def write(path: Path, rows: list[list[str]], separator: str = "\t") -> Path:
    lines = [separator.join(fields) for fields in rows]
    if separator == ",":
        lines.insert(0, CSV_HEADER)
    path.write_text("\n".join(lines) + "\n")
    return path


def reference_row(value: int, column: int, num_embeddings: int) -> int:
    """splitmix64's finaliser on Python integers."""
    z = (value + (column + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) % (num_embeddings - 1) + 1


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return load("criteo", path=write(tmp_path / "log.tsv", ROWS), num_embeddings=50, holdout_frac=1 / 3)


def test_counts_become_signed_logs_and_missing_is_marked(dataset: Dataset) -> None:
    assert dataset.schema.dense[:2] == ("I1", "I2")
    assert dataset.schema.dense[13:15] == ("I1_missing", "I2_missing")
    expected = np.log1p([3, 2, 0, 17]) * [1, -1, 1, 1]
    np.testing.assert_allclose(dataset.train.dense[:, 0], expected, rtol=2**-23)
    np.testing.assert_array_equal(dataset.train.dense[:, 14], [0, 0, 1, 0])
    assert dataset.train.dense[:, 13].sum() == 0
    assert dataset.train.dense[2, 1] == 0


def test_categories_are_hashed_per_column_and_missing_is_row_zero(dataset: Dataset) -> None:
    for column, name in enumerate(dataset.schema.sparse_names):
        values = [0x05DB9164, 0x05DB9164, 0x05DB9164, 0xFFFFFFFF]
        expected = [reference_row(value, column, 50) for value in values]
        if name == "C7":  # field 20 of a line
            expected[2] = 0
        assert dataset.train.sparse[name].values.tolist() == expected
    rows = {int(dataset.train.sparse[name].values[0]) for name in dataset.schema.sparse_names}
    assert len(rows) > 15, "columns must not share their hash"


def test_hash_spreads_evenly_and_never_hits_the_missing_row() -> None:
    values = np.arange(100_000, dtype=np.uint64)[:, None]
    rows = hash_categories(values, np.ones_like(values, dtype=bool), 101)
    counts = np.bincount(rows[:, 0], minlength=101)
    assert counts[0] == 0
    # 100 bins with mean 1000: five sigma of a binomial count is below 5 sqrt(1000).
    assert np.abs(counts[1:] - 1000).max() < 5 * np.sqrt(1000)


def test_split_labels_and_order(dataset: Dataset) -> None:
    assert dataset.schema.tasks == ("click",)
    assert dataset.schema.streams == ()
    assert dataset.train.labels[:, 0].tolist() == [0, 1, 1, 0]
    assert dataset.test.sample_ids.tolist() == [4, 5]


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_layouts_and_chunk_sizes_agree(tmp_path: Path, dataset: Dataset, chunk_rows: int) -> None:
    path = write(tmp_path / "log.csv", ROWS, separator=",")
    other = load("criteo", path=path, num_embeddings=50, holdout_frac=1 / 3, chunk_rows=chunk_rows)
    np.testing.assert_array_equal(other.train.dense, dataset.train.dense)
    np.testing.assert_array_equal(other.test.labels, dataset.test.labels)
    for name in dataset.schema.sparse_names:
        np.testing.assert_array_equal(other.train.sparse[name].values, dataset.train.sparse[name].values)


def test_max_rows_reads_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", [*ROWS[:4], ["corrupt"]])
    dataset = load("criteo", path=path, max_rows=4, holdout_frac=0.5)
    assert (len(dataset.train), len(dataset.test)) == (2, 2)


BAD_ROWS = {
    "39 columns (no label)": row()[1:],
    "label": row(label="2"),
    "no label": row(label=""),
    "count": row(counts="many"),
    "NaN count": row(counts="nan"),
    "infinite count": row(counts="1e999"),
    "not hexadecimal": row(category="xyz"),
    "17 digits": row(category="1" + "0" * 16),
    "negative": row(category="-1"),
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS.keys())
@pytest.mark.parametrize("separator, line", [("\t", 3), (",", 4)], ids=["tsv", "csv"])
def test_a_corrupt_line_is_named(tmp_path: Path, bad: list[str], separator: str, line: int) -> None:
    path = write(tmp_path / "log", [*ROWS[:2], bad, *ROWS[3:]], separator)
    with pytest.raises(ValueError, match=rf"log, line {line}: .* is corrupt; expected 40 columns: a label 0 or 1"):
        load("criteo", path=path)


def test_bad_files_and_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(FileNotFoundError, match="log does not exist"):
        load("criteo", path=path)
    path.write_text("")
    with pytest.raises(ValueError, match="log holds no rows"):
        load("criteo", path=path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"line 1: 'a,b' is corrupt; expected tab-separated columns, or the header"):
        load("criteo", path=path)
    with pytest.raises(ValueError, match="criteo needs path=FILE"):
        load("criteo")
    with pytest.raises(ValueError, match="num_embeddings must be at least 2"):
        load("criteo", path=path, num_embeddings=1)


def test_the_sample_of_the_published_log(test_data: Path) -> None:
    dataset = load("criteo", path=test_data / "samples" / "criteo_sample.csv", num_embeddings=1000)
    assert len(dataset.train) + len(dataset.test) == 200
    first = dataset.train.take(np.array([0]))
    np.testing.assert_allclose(first.dense[0, :3], [0, np.log1p(3), np.log1p(260)], rtol=2**-23)
    assert first.dense[0, 13:16].tolist() == [1, 0, 0]
    assert first.sparse["C1"].values.tolist() == [reference_row(0x05DB9164, 0, 1000)]
    assert first.sparse["C26"].values.tolist() == [0]
