"""Finished units of a long run, each durable as soon as it is done, in one SQLite file.

A unit is a row: what it is (its key) and what was found. Rows of one batch are written in one
transaction, so that a killed run leaves whole batches, and a resumed run computes the others as
they would have been. The configuration is kept beside them: a store never mixes two runs.
"""

import hashlib
import json
import math
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from cw_lens.errors import CWLensError, CWLensWarning

STORE = "units.sqlite"
LOCK = ".running"
_KINDS = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bytes": "BLOB"}


class StoreError(CWLensError, OSError):
    """A store that is in use, that belongs to another run, or that cannot be written."""


class CorruptStoreWarning(CWLensWarning):
    """A damaged store was set aside; the run begins anew."""


class UnitStore:
    """Units of one run; open it with `opened_store`."""

    def __init__(self, path: Path, columns: Mapping[str, type], connection: sqlite3.Connection):
        self._path = path
        self._columns = dict(columns)
        self._connection = connection

    def done(self) -> set[int]:
        """Numbers of the batches that are finished."""
        rows = self._connection.execute("SELECT batch FROM batches")
        return {batch for (batch,) in rows}

    def add(self, batch: int, units: Sequence[Mapping[str, Any]]) -> None:
        """Keeps a finished batch; when this returns it is on the disk.

        Raises:
            StoreError: the disk is full or the folder cannot be written any more. What was kept
                before is not lost.
        """
        names = list(self._columns)
        places = ", ".join("?" * (len(names) + 2))
        rows = [
            (batch, at, *(_stored(unit[name]) for name in names)) for at, unit in enumerate(units)
        ]
        with self._writing():
            self._connection.executemany(f"INSERT INTO units VALUES ({places})", rows)
            self._connection.execute("INSERT INTO batches VALUES (?, ?)", (batch, _digest(rows)))

    def forget_if_empty(self) -> None:
        """Drops the configuration of a run that finished nothing: the store is nobody's yet."""
        if not self.done():
            with self._writing():
                self._connection.execute("DELETE FROM run")

    def require(self, fields: Mapping[str, Any]) -> None:
        """Notes these fields of the configuration; refuses values that differ from those held.

        Raises:
            StoreError: naming the first field that differs.
        """
        held = {
            field: json.loads(value)
            for field, value in self._connection.execute("SELECT field, value FROM run")
        }
        for field, value in json.loads(json.dumps(dict(fields))).items():
            if field in held and held[field] != value:
                raise StoreError(
                    f"{self._path.parent} holds another run: {field} was {short(held[field])} "
                    f"there and is {short(value)} here. Give another folder with --out, or remove "
                    "this one."
                )
            if field not in held:
                text = json.dumps(value)
                with self._writing():
                    self._connection.execute("INSERT INTO run VALUES (?, ?)", (field, text))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """All that is written inside, or nothing of it."""
        try:
            with self._connection:
                yield
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot write {self._path}: {error}. What is finished is kept; make room or mend "
                "the folder, then run the same command again to go on."
            ) from error

    def table(self) -> pd.DataFrame:
        """Every unit kept, in the order of batches, whenever each was finished."""
        names = ", ".join(f'"{name}"' for name in self._columns)
        rows = self._connection.execute(f"SELECT {names} FROM units ORDER BY batch, at").fetchall()
        frame = pd.DataFrame(rows, columns=list(self._columns))
        kinds = {name: kind.__name__ for name, kind in self._columns.items() if kind is not bytes}
        return frame.astype(kinds)


@contextmanager
def opened_store(
    folder: Path, configuration: Mapping[str, Any], columns: Mapping[str, type]
) -> Iterator[UnitStore]:
    """The folder's store, new or with what an earlier run of the same configuration finished.

    One process holds it at a time. A damaged store is renamed and a new one begun.

    Args:
        folder: an existing folder.
        configuration: what the run computes, of JSON's types.
        columns: name -> str, int, float or bytes of each unit's values.

    Raises:
        StoreError: another process runs in the folder; the store is of another configuration
            (the message names the first field that differs); it cannot be written.

    Warns:
        CorruptStoreWarning: naming the file that was set aside.
    """
    path = folder / STORE
    try:
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StoreError(
            f"another cw-lens is running in {folder}. Wait for it to end, or give another folder "
            "with --out."
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot write {folder}: {error.strerror}. Give another folder with --out."
        ) from error
    try:
        connection = _connected(path, columns)
        try:
            store = UnitStore(path, columns, connection)
            store.forget_if_empty()
            store.require(configuration)
            store.require({"columns": list(columns)})
            yield store
        finally:
            connection.close()
    finally:
        lock.release()


def _connected(path: Path, columns: Mapping[str, type]) -> sqlite3.Connection:
    """A connection to a sound store; what is damaged is set aside."""
    try:
        return _open(path, columns)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # the disk, the folder: not the content
            raise StoreError(
                f"cannot open {path}: {error}. Make room, or give another folder with --out."
            ) from error
        aside = _aside(path)
        warnings.warn(
            f"{path} is damaged ({error}); it was set aside as {aside.name}, and what it held is "
            "computed anew.",
            CorruptStoreWarning,
            stacklevel=4,
        )
        try:
            return _open(path, columns)
        except sqlite3.Error as again:
            raise StoreError(
                f"cannot open {path}: {again}. Make room, or give another folder with --out."
            ) from again


def _open(path: Path, columns: Mapping[str, type]) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10)
    try:
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict.splitlines()[-1])
        kinds = "".join(f', "{name}" {_KINDS[kind.__name__]}' for name, kind in columns.items())
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS run (field TEXT, value TEXT)")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS batches (batch INTEGER PRIMARY KEY, digest)"
            )
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS units (batch INTEGER, at INTEGER{kinds}, "
                "PRIMARY KEY (batch, at))"
            )
        _require_sound(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_sound(connection: sqlite3.Connection) -> None:
    """Holds the units of each batch against its digest: SQLite does not see a changed number."""
    for field, value in connection.execute("SELECT field, value FROM run"):
        try:
            json.loads(value)
        except (TypeError, ValueError) as error:
            raise sqlite3.DatabaseError(f"its {field} cannot be read") from error
    digests = dict(connection.execute("SELECT batch, digest FROM batches ORDER BY batch"))
    rows = connection.execute("SELECT * FROM units ORDER BY batch, at")
    found = {batch: _digest(list(units)) for batch, units in groupby(rows, key=itemgetter(0))}
    wrong = [batch for batch in {**digests, **found} if digests.get(batch) != found.get(batch)]
    if wrong:
        raise sqlite3.DatabaseError(f"the units of batch {wrong[0]} are not those written")


def _digest(rows: Sequence[tuple]) -> str:
    held = [tuple(_short_bytes(value) for value in row) for row in rows]
    return hashlib.sha256(repr(held).encode()).hexdigest()


def _short_bytes(value: Any) -> Any:
    return hashlib.sha256(value).digest() if isinstance(value, bytes) else value


def short(value: Any) -> str:
    """A value of a configuration in at most sixty characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _stored(value: Any) -> Any:
    """SQLite keeps a NaN as NULL, which comes back as NaN, and knows no negative zero."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else value + 0.0


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_suffix(f".damaged-{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, aside)
    for suffix in ("-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside
