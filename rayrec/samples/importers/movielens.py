"""The layout `movielens`: the archives as GroupLens publishes them.

    ml-100k                  u.data (tabs), u.item and u.user (bars, Latin-1)
    ml-1m, ml-10m            ratings.dat, movies.dat (double colons; Latin-1, of ml-10m UTF-8)

The newer ones (ratings.csv) are ordinary event logs: see `events`.
Source: the README of each archive, https://grouplens.org/datasets/movielens/
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import RawTable, RawTables, files_of, visible

_GENRES_100K = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)


@dataclass(frozen=True)
class _Archive:
    """How one generation of archives writes its tables."""

    ratings: str
    movies: str
    separator: str
    users: str | None = None


_ARCHIVES = (
    _Archive("u.data", "u.item", "|", users="u.user"),
    _Archive("ratings.dat", "movies.dat", "::"),
)


class MovieLensImporter(Importer):
    """Reads the archives that GroupLens publishes."""

    EXPECTS = "MovieLens' u.data or ratings.dat"
    NAMES_COLUMNS = False

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.is_dir() and _archive(source) is not None

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        archive = _archive(source) if source.is_dir() else None
        if archive is None:
            raise InputError(
                f"{source}: no MovieLens archive; expected u.data or ratings.dat, found {files_of(source)}"
            )
        read = [name for name in (archive.ratings, archive.movies, archive.users) if name is not None]
        movies = source / archive.movies
        users = None if archive.users is None else source / archive.users
        return RawTables(
            name=source.resolve().name,
            interactions=_ratings(source / archive.ratings, archive),
            items=_movies(movies, archive) if movies.is_file() else None,
            users=_users(users, archive) if users is not None and users.is_file() else None,
            ignored=tuple(
                (entry.name, f"only {', '.join(read)} are read")
                for entry in visible(source)
                if entry.name not in read
            ),
        )


def _archive(source: Path) -> _Archive | None:
    return next((archive for archive in _ARCHIVES if (source / archive.ratings).is_file()), None)


def _ratings(path: Path, archive: _Archive) -> RawTable:
    separator = "\t" if path.name == "u.data" else archive.separator
    rows = list(_rows(path, separator, num_columns=4))
    users, items, ratings, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = pa.table(
        {
            "user_id": pa.array(users, pa.string()),
            "item_id": pa.array(items, pa.string()),
            "timestamp": pa.array(times, pa.string()),
            "rating": _numbers(path, ratings),
        }
    )
    return _raw(table, path)


def _movies(path: Path, archive: _Archive) -> RawTable:
    if path.name == "u.item":
        rows = list(_rows(path, archive.separator, num_columns=5 + len(_GENRES_100K)))
        genres = [
            " ".join(genre for genre, flag in zip(_GENRES_100K, row[5:], strict=True) if flag == "1")
            for row in rows
        ]
    else:
        rows = list(_rows(path, archive.separator, num_columns=3))
        genres = [row[2].replace("|", " ") for row in rows]
    table = pa.table(
        {
            "item_id": pa.array([row[0] for row in rows], pa.string()),
            "title": pa.array([row[1] for row in rows], pa.string()),
            "genres": pa.array(genres, pa.string()),
        }
    )
    return _raw(table, path)


def _users(path: Path, archive: _Archive) -> RawTable:
    rows = list(_rows(path, archive.separator, num_columns=5))
    names = ("user_id", "age", "gender", "occupation", "zip_code")
    columns = {name: pa.array([row[at] for row in rows], pa.string()) for at, name in enumerate(names)}
    return _raw(pa.table(columns), path)


def _rows(path: Path, separator: str, num_columns: int) -> Iterator[list[str]]:
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected rows of {num_columns} values")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # since ml-10m
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    with io.StringIO(text) as file:
        for number, line in enumerate(file, start=1):
            row = line.rstrip("\r\n").split(separator)
            if len(row) != num_columns:
                raise InputError(
                    f"{path} line {number}: {len(row)} values, "
                    f"expected {num_columns} separated by {separator!r}"
                )
            yield row


def _numbers(path: Path, values: tuple[str, ...]) -> pa.Array:
    try:
        return pa.array([float(value) for value in values], pa.float64())
    except ValueError as error:
        raise InputError(
            f"{path}: a rating is not a number ({error}); expected one such as 4 or 3.5"
        ) from error


def _raw(table: pa.Table, path: Path) -> RawTable:
    return RawTable(table, str(path), lambda row: f"{path} line {row + 1}")
