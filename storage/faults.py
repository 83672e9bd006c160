"""From what a database driver raises to our errors, with one clear message and no password."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autotune.errors import InputError, StoreError, StoreReadOnlyError
from storage.engine import Location, may

# https://www.postgresql.org/docs/current/errcodes-appendix.html
READ_ONLY_TRANSACTION = "25006"
INSUFFICIENT_PRIVILEGE = "42501"
NUL_REFUSED = "cannot contain NUL"  # psycopg: no such text can be in the database, so nothing has that name


@contextmanager
def translated(location: Location) -> Iterator[None]:
    """Turns database errors into StoreError and StoreReadOnlyError; our own errors pass unchanged.

    A name with a NUL, which PostgreSQL cannot even be asked for, is an InputError.
    """
    try:
        yield
    except DBAPIError as error:
        if NUL_REFUSED in str(error.orig):
            raise InputError("name", "...\x00...", "text without NUL characters") from error
        raise _fault(error.orig or error, location) from error
    except sqlite3.Error as error:
        raise _fault(error, location) from error
    except SQLAlchemyError as error:
        raise StoreError(f"{location.name}: {_clean(error, location)}") from error


def _fault(error: BaseException, location: Location) -> StoreError:
    if isinstance(error, sqlite3.Error):
        return _sqlite_fault(error, location)
    if getattr(error, "sqlstate", None) in {READ_ONLY_TRANSACTION, INSUFFICIENT_PRIVILEGE}:
        return StoreReadOnlyError(f"{location.name} cannot be written: {_clean(error, location)}")
    return StoreError(f"{location.name}: {_clean(error, location)}")


def _sqlite_fault(error: sqlite3.Error, location: Location) -> StoreError:
    """Extended result codes carry the primary one in their low byte (https://sqlite.org/rescode.html)."""
    code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
    if code == sqlite3.SQLITE_READONLY:
        return StoreReadOnlyError(f"{location.name} cannot be written: the file or its directory is read-only")
    if code == sqlite3.SQLITE_CANTOPEN:
        return _cannot_open(location)
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        return StoreError(f"{location.name} is not a usable SQLite database: {error}")
    if code == sqlite3.SQLITE_BUSY:
        return StoreError(f"{location.name} is locked by another process that does not end its transaction")
    if code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
        return StoreError(f"{location.name}: {error} (is there space left?)")
    return StoreError(f"{location.name}: {error}")


def _cannot_open(location: Location) -> StoreError:
    path = location.path
    if path is None or not os.path.isdir(path.parent):
        return StoreError(f"{location.name} cannot be opened: its directory does not exist")
    if os.path.isdir(path):
        return StoreError(f"{location.name} cannot be opened: it is a directory")
    if not may(os.W_OK, path.parent) and may(os.R_OK, path if os.path.exists(path) else path.parent):
        return StoreReadOnlyError(f"{location.name} cannot be written: its directory is read-only")
    return StoreError(f"{location.name} cannot be opened: " + ("no access" if os.path.exists(path) else "no such file"))


def _clean(error: BaseException, location: Location) -> str:
    """The first line of the message, without the password wherever it may stand."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.replace(location.secret, "***") if location.secret else text
