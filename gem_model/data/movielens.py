"""MovieLens readers: ML-100K as shipped by the recbole wheel, and the ml-latest-small CSV files.

Both give a `RatingsLog`; `ratings.py` holds the features. ML-100K adds `age_group` (decades), `gender` and `occupation`
of the user as sparse features and `age` ((years - 35) / 15) as a dense one. MovieLens may be used for research under
the GroupLens terms (see docs/data.md); no data is part of this repository.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gem_model.data.options import make_options
from gem_model.data.ratings import FIRST_YEAR, LAST_YEAR, RatingsLog, RatingsOptions, build_ratings_dataset
from gem_model.data.source import Dataset, IdColumn, IntArray
from gem_model.data.textfile import corrupt_line, lines_after_header

INTER_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
USER_HEADER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
ITEM_HEADER = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"
UNKNOWN_YEARS = {"", "V", "unkonwn", "unknown"}  # as spelt in the ML-100K item file
YEAR_AT_END = re.compile(r"\((\d{4})(?:-\d{0,4}|–\d{0,4})?\)\s*$")
AGE_GROUPS = 10
MAX_SECONDS = 1 << 40


def load_ml_100k(*, path: str | Path | None = None, **options: Any) -> Dataset:
    """MovieLens-100K from `ml-100k.inter/.user/.item` in `path`, by default the files of the installed recbole wheel.

    `options` are the fields of `RatingsOptions`. Raises FileNotFoundError saying how to get the files, ValueError
    naming file and line for corrupt data.
    """
    folder = _recbole_folder() if path is None else Path(path).expanduser()
    checked = make_options(RatingsOptions, "ml-100k", options)
    return build_ratings_dataset("ml-100k", read_ml_100k(folder), checked)


def load_ml_latest_small(*, path: str | Path | None = None, **options: Any) -> Dataset:
    """MovieLens latest-small (half stars, no demographics) from `ratings.csv` and `movies.csv` in `path`.

    `options` are the fields of `RatingsOptions`; the log is two decades long, so `holdout_days` is 365 unless given.
    Raises ValueError without `path`, FileNotFoundError for a missing file, ValueError naming a corrupt line.
    """
    if path is None:
        raise ValueError(
            "ml-latest-small needs path=FOLDER with ratings.csv and movies.csv; get it from "
            "https://grouplens.org/datasets/movielens/latest/"
        )
    checked = make_options(RatingsOptions, "ml-latest-small", {"holdout_days": 365.0} | options)
    return build_ratings_dataset("ml-latest-small", read_ml_latest(Path(path).expanduser()), checked)


def read_ml_100k(folder: Path) -> RatingsLog:
    """Parse the three ML-100K files into a log; users and items are indexed in the order of their files."""
    users, ages, genders, occupations = _read_users(folder / "ml-100k.user")
    items, years, genres = _read_items(folder / "ml-100k.item")
    user, item, level, seconds = _read_ratings(
        folder / "ml-100k.inter", INTER_HEADER, "\t", users, items, step=1.0, levels=5
    )
    genre_column, num_genres = _multi_hot(genres)
    return RatingsLog(
        user=user,
        item=item,
        level=level,
        seconds=seconds,
        step=1.0,
        levels=5,
        num_users=len(users),
        genres=genre_column,
        num_genres=num_genres,
        release_year=np.array(years, dtype=np.int64),
        user_sparse={
            "age_group": (np.minimum(np.array(ages, dtype=np.int64) // 10, AGE_GROUPS - 1), AGE_GROUPS),
            "gender": _categories(genders),
            "occupation": _categories(occupations),
        },
        user_dense={"age": ((np.array(ages) - 35) / 15).astype(np.float32)},
    )


def read_ml_latest(folder: Path) -> RatingsLog:
    """Parse `ratings.csv` and `movies.csv`; users are indexed in the order of their ids, items of the movie file."""
    items, years, genres = _read_movies(folder / "movies.csv")
    ratings = folder / "ratings.csv"
    user, item, level, seconds = _read_ratings(
        ratings, "userId,movieId,rating,timestamp", ",", None, items, step=0.5, levels=10
    )
    known_users, user = np.unique(user, return_inverse=True)
    genre_column, num_genres = _multi_hot(genres)
    return RatingsLog(
        user=user.astype(np.int64),
        item=item,
        level=level,
        seconds=seconds,
        step=0.5,
        levels=10,
        num_users=len(known_users),
        genres=genre_column,
        num_genres=num_genres,
        release_year=np.array(years, dtype=np.int64),
        user_sparse={},
        user_dense={},
    )


def _recbole_folder() -> Path:
    spec = find_spec("recbole")  # locates the package; importing it would pull in its dependencies
    for root in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(root) / "dataset_example" / "ml-100k"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "MovieLens-100K not found: run `pip install --no-deps recbole==1.2.1` (its wheel ships the files), or give "
        "path=FOLDER with ml-100k.inter, ml-100k.user and ml-100k.item"
    )


def _read_ratings(
    path: Path,
    header: str,
    separator: str,
    users: dict[str, int] | None,
    items: dict[str, int],
    *,
    step: float,
    levels: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(user, item, level, seconds), int64 [N] each. Without a table of users their ids are kept as numbers."""
    expected = (
        f"a known user, a known item, a rating in {step:g}..{levels * step:g} in steps of {step:g} and a Unix time, "
        f"separated by {separator!r}"
    )
    rows: list[tuple[int, int, float, int]] = []
    for number, line in lines_after_header(path, header):
        try:
            user, item, rating, seconds = line.split(separator)
            owner = _whole_number(user) if users is None else users[user]
            row = (owner, items[item], _decimal(rating) / step, _whole_number(seconds))
        except (ValueError, KeyError):
            corrupt_line(path, number, line, expected)
        if row[2] not in range(1, levels + 1) or row[3] >= MAX_SECONDS:
            corrupt_line(path, number, line, expected)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no ratings after its header")
    user_column, item_column, level, time = np.array(rows, dtype=np.int64).T.copy()
    return user_column, item_column, level, time


def _read_users(path: Path) -> tuple[dict[str, int], list[int], list[str], list[str]]:
    expected = "five tab-separated fields: new user id, age in 0..120, gender, occupation, zip code"
    index: dict[str, int] = {}
    ages: list[int] = []
    genders: list[str] = []
    occupations: list[str] = []
    for number, line in lines_after_header(path, USER_HEADER):
        fields = line.split("\t")
        if len(fields) != 5 or fields[0] in index or not _is_whole(fields[1]) or int(fields[1]) > 120:
            corrupt_line(path, number, line, expected)
        index[fields[0]] = len(index)
        ages.append(int(fields[1]))
        genders.append(fields[2])
        occupations.append(fields[3])
    return index, ages, genders, occupations


def _read_items(path: Path) -> tuple[dict[str, int], list[int], list[list[str]]]:
    expected = f"four tab-separated fields: new item id, title, release year ({FIRST_YEAR}..{LAST_YEAR}), genres"
    index: dict[str, int] = {}
    years: list[int] = []
    genres: list[list[str]] = []
    for number, line in lines_after_header(path, ITEM_HEADER):
        fields = line.split("\t")
        if len(fields) != 4 or fields[0] in index:
            corrupt_line(path, number, line, expected)
        year = "0" if fields[2] in UNKNOWN_YEARS else fields[2]
        if not _is_whole(year) or not _is_year(int(year)):
            corrupt_line(path, number, line, expected)
        index[fields[0]] = len(index)
        years.append(int(year))
        genres.append(fields[3].split())
    return index, years, genres


def _read_movies(path: Path) -> tuple[dict[str, int], list[int], list[list[str]]]:
    expected = "three comma-separated fields: new movie id, title (release year in brackets at its end), genres A|B"
    index: dict[str, int] = {}
    years: list[int] = []
    genres: list[list[str]] = []
    for number, line in lines_after_header(path, "movieId,title,genres"):
        try:
            fields = next(csv.reader([line]), [])
        except csv.Error:  # a bare carriage return, or a field longer than csv allows
            corrupt_line(path, number, line, expected)
        if len(fields) != 3 or not _is_whole(fields[0]) or fields[0] in index:
            corrupt_line(path, number, line, expected)
        found = YEAR_AT_END.search(fields[1])
        year = int(found[1]) if found else 0
        if not _is_year(year):
            corrupt_line(path, number, line, expected)
        index[fields[0]] = len(index)
        years.append(year)
        genres.append(fields[2].split("|"))
    return index, years, genres


def _is_whole(text: str) -> bool:
    """True for plain digits that fit int64; Python's int() takes signs, blanks, 1_0 and any length."""
    return re.fullmatch(r"[0-9]{1,18}", text) is not None


def _whole_number(text: str) -> int:
    if not _is_whole(text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _decimal(text: str) -> float:
    if re.fullmatch(r"[0-9]{1,18}(?:\.[0-9]{1,18})?", text) is None:
        raise ValueError(f"{text!r} is no decimal number")
    return float(text)


def _is_year(year: int) -> bool:
    return year == 0 or FIRST_YEAR <= year <= LAST_YEAR


def _categories(values: Sequence[str]) -> tuple[IntArray, int]:
    """Ids in alphabetical order and their number."""
    names, ids = np.unique(np.array(values), return_inverse=True)
    return ids.astype(np.int64), len(names)


def _multi_hot(names: Sequence[Sequence[str]]) -> tuple[IdColumn, int]:
    flat, size = _categories([name for row in names for name in row])
    lengths = np.array([len(row) for row in names], dtype=np.int64)
    return IdColumn(values=flat, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])), size
