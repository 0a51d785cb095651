"""MovieLens readers: facts about the real files that can be checked by hand, and every kind of corrupt line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gem_model.data import Dataset, load, movielens
from gem_model.data.movielens import read_ml_100k, read_ml_latest

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
USER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"


def write_ml_100k(folder: Path, **replaced: list[str]) -> Path:
    files = {
        "inter": [INTER, "7\t20\t4\t1000", "8\t10\t5\t1001", "7\t10\t1\t900"],
        "user": [USER, "7\t24\tM\twriter\t85711", "8\t53\tF\tartist\tV3N4P"],
        "item": [ITEM, "10\tToy Story\t1995\tAnimation Children's", "20\tunknown\tV\tunknown"],
    } | replaced
    for suffix, lines in files.items():
        (folder / f"ml-100k.{suffix}").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape") + b"\n")
    return folder


def write_ml_latest(folder: Path, **replaced: list[str]) -> Path:
    files = {
        "ratings": ["userId,movieId,rating,timestamp", "3,10,0.5,1000", "1,20,4.5,900"],
        "movies": ["movieId,title,genres", '10,"Net, The (1995)",Action|Crime', "20,Hyena Road,(no genres listed)"],
    } | replaced
    for name, lines in files.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_ml_100k_files_become_a_log(tmp_path: Path) -> None:
    log = read_ml_100k(write_ml_100k(tmp_path))
    assert (log.user.tolist(), log.item.tolist()) == ([0, 1, 0], [1, 0, 0])
    assert (log.level.tolist(), log.seconds.tolist()) == ([4, 5, 1], [1000, 1001, 900])
    assert log.release_year.tolist() == [1995, 0]
    assert (log.genres.values.tolist(), log.genres.offsets.tolist()) == ([0, 1, 2], [0, 2, 3])
    assert [ids.tolist() for ids, _ in log.user_sparse.values()] == [[2, 5], [1, 0], [1, 0]]
    np.testing.assert_allclose(log.user_dense["age"], [(24 - 35) / 15, (53 - 35) / 15], rtol=2**-23)


def test_ml_latest_files_become_a_log(tmp_path: Path) -> None:
    log = read_ml_latest(write_ml_latest(tmp_path))
    assert (log.user.tolist(), log.item.tolist(), log.level.tolist()) == ([1, 0], [0, 1], [1, 9])
    assert log.stars.tolist() == [0.5, 4.5]
    assert log.release_year.tolist() == [1995, 0]
    assert (log.num_users, log.num_items, log.num_genres) == (2, 2, 3)


BAD_LINES = {
    "three fields": ("inter", [INTER, "7\t20\t4\t1000", "7\t20\t4"], 3, "a known user, a known item"),
    "no number": ("inter", [INTER, "7\t20\tgood\t1000"], 2, r"a rating in 1\.\.5"),
    "rating 6": ("inter", [INTER, "7\t20\t6\t1000"], 2, r"a rating in 1\.\.5"),
    "rating 3.5": ("inter", [INTER, "7\t20\t3.5\t1000"], 2, "in steps of 1"),
    "rating NaN": ("inter", [INTER, "7\t20\tnan\t1000"], 2, r"a rating in 1\.\.5"),
    "unknown user": ("inter", [INTER, "9\t20\t4\t1000"], 2, "a known user"),
    "unknown item": ("inter", [INTER, "7\t21\t4\t1000"], 2, "a known item"),
    "time < 0": ("inter", [INTER, "7\t20\t4\t-5"], 2, "a Unix time"),
    "huge time": ("inter", [INTER, f"7\t20\t4\t{10**30}"], 2, "a Unix time"),
    "no header": ("inter", ["7\t20\t4\t1000"], 1, "the header"),
    "empty file": ("user", [""], 1, "the header"),
    "age": ("user", [USER, "7\told\tM\twriter\t1"], 2, "age in 0..120"),
    "same user twice": ("user", [USER, "7\t24\tM\twriter\t1", "7\t24\tM\twriter\t1"], 3, "new user id"),
    "year": ("item", [ITEM, "10\tToy Story\t19995\tDrama"], 2, r"release year \(1900\.\.2099\)"),
    "not UTF-8": ("item", [ITEM, "10\tToy \udcff\t1995\tDrama"], 2, "UTF-8 text"),
    "blank line": ("inter", [INTER, "", "7\t20\t4\t1000"], 2, "a known user"),
}


@pytest.mark.parametrize("suffix, lines, number, expected", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_corrupt_ml_100k_line_is_named(
    tmp_path: Path, suffix: str, lines: list[str], number: int, expected: str
) -> None:
    write_ml_100k(tmp_path, **{suffix: lines})
    with pytest.raises(ValueError, match=rf"ml-100k\.{suffix}, line {number}: .* is corrupt; expected .*{expected}"):
        read_ml_100k(tmp_path)


@pytest.mark.parametrize(
    "name, line, expected",
    [
        ("ratings", "3,10,0.4,1000", r"0\.5\.\.5 in steps of 0\.5"),
        ("ratings", "3,10,0,1000", r"0\.5\.\.5"),
        ("ratings", "x,10,1,1000", "a known user"),
        ("movies", "x,Net (1995),Drama", "new movie id"),
        ("movies", "10,Net (1234),Drama", "release year"),
        ("movies", "10,Net, The (1995),Drama", "three comma-separated fields"),
    ],
)
def test_a_corrupt_ml_latest_line_is_named(tmp_path: Path, name: str, line: str, expected: str) -> None:
    header = {"ratings": "userId,movieId,rating,timestamp", "movies": "movieId,title,genres"}[name]
    write_ml_latest(tmp_path, **{name: [header, line]})
    with pytest.raises(ValueError, match=rf"{name}\.csv, line 2: .* is corrupt; expected .*{expected}"):
        read_ml_latest(tmp_path)


def test_a_long_corrupt_line_is_shortened(tmp_path: Path) -> None:
    write_ml_100k(tmp_path, inter=[INTER, "x" * 5000])
    with pytest.raises(ValueError, match=r"line 2: 'x{80}\.\.\.' is corrupt"):
        read_ml_100k(tmp_path)


def test_missing_files_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"ml-100k\.user does not exist"):
        load("ml-100k", path=tmp_path)
    monkeypatch.setattr(movielens, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps recbole==1\.2\.1"):
        load("ml-100k")
    with pytest.raises(ValueError, match="ml-latest-small needs path=FOLDER"):
        load("ml-latest-small")
    write_ml_100k(tmp_path, inter=[INTER])
    with pytest.raises(ValueError, match="has no ratings after its header"):
        read_ml_100k(tmp_path)


def test_ml_100k_facts(ml_100k: Dataset) -> None:
    """Published: 100,000 ratings, 943 users, 1,682 movies, 19 genres, 21,201 ratings of five stars, 34,174 of four."""
    train, test = ml_100k.train, ml_100k.test
    assert (len(train), len(test)) == (83_213, 16_787)
    labels = np.concatenate([train.labels, test.labels])
    assert labels.sum(axis=0).tolist() == [34_174 + 21_201, 21_201]
    sizes = {feature.name: feature.num_embeddings for feature in ml_100k.schema.sparse}
    assert (sizes["user_id"], sizes["item_id"], sizes["genres"]) == (944, 1683, 19)
    assert (sizes["age_group"], sizes["gender"], sizes["occupation"]) == (10, 2, 21)
    stream = test.streams["ratings"]
    last = stream.request_seconds.max()
    assert last == 893_286_638
    assert stream.request_seconds.min() >= last - 30 * 86_400 > train.streams["ratings"].request_seconds.max()
    assert (stream.stop - stream.start).max() == 32


def test_ml_100k_needs_no_import_of_recbole(ml_100k: Dataset) -> None:
    assert "recbole" not in sys.modules


def test_ml_latest_small_facts(test_data: Path) -> None:
    dataset = load("ml-latest-small", path=test_data / "ml-latest-small")
    stars = np.concatenate([source.labels for source in (dataset.train, dataset.test)])
    lines = (test_data / "ml-latest-small" / "ratings.csv").read_text().splitlines()[1:]
    ratings = np.array([float(line.split(",")[2]) for line in lines])
    assert stars.sum(axis=0).tolist() == [(ratings >= 4).sum(), (ratings == 5).sum()]
    assert dataset.schema.streams[0].num_actions == 11
    assert len(dataset.test) > 1000
