"""Opening: new, older, newer, unreadable and foreign databases, and one with Optuna's tables in it."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from processes import run_apart
from services import PASSWORD, PostgresServer
from sqlalchemy import Engine, text
from store_records import CLUSTER, MODEL

from autotune.errors import StoreError, StoreNewerError, StoreReadOnlyError
from storage import SqlStore, open_store
from storage.care.backup import backup
from storage.care.maintenance import check, migrate, stats
from storage.database.engine import build_engine, locate
from storage.database.schema import HEAD, MIGRATIONS, REVISIONS, VERSION_TABLE
from storage.tunings.tables import Base


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    """An engine of our own kind over a database."""
    made = build_engine(locate(url), read_only=False)
    yield made
    made.dispose()


@pytest.fixture
def empty(empty_url: str) -> Iterator[Engine]:
    with engine_of(empty_url) as engine:
        yield engine


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def test_the_known_revisions_are_one_line_of_migrations() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    assert tuple(script.revision for script in scripts)[::-1] == REVISIONS


def test_the_baseline_makes_exactly_the_tables_of_the_code(store: SqlStore) -> None:
    def ours(_object: object, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:
        return not (kind == "table" and name == VERSION_TABLE)

    with store.reading() as session:
        context = MigrationContext.configure(session.connection(), opts={"include_object": ours})
        assert compare_metadata(context, Base.metadata) == []


def test_opening_again_changes_nothing(empty_url: str) -> None:
    assert migrate(empty_url).found is None
    assert migrate(empty_url).found == HEAD


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_schema_is_left_alone(url: str, read_only: bool) -> None:
    with engine_of(url) as engine:
        execute(engine, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        with pytest.raises(StoreNewerError, match=r"'9999'.*upgrade autotune"):
            open_store(url, read_only=read_only)
        with engine.connect() as connection:
            assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar() == "9999"


def test_reading_needs_our_schema_and_makes_nothing(empty_url: str, empty: Engine) -> None:
    if empty.dialect.name == "sqlite":
        with pytest.raises(StoreError, match="no such file"):
            open_store(empty_url, read_only=True)
        assert not locate(empty_url).path.exists()
    execute(empty, "CREATE TABLE others (id INTEGER)")
    with pytest.raises(StoreError, match="nothing of autotune"):
        open_store(empty_url, read_only=True)
    execute(empty, f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32))")
    with pytest.raises(StoreError, match="nothing of autotune"):
        open_store(empty_url, read_only=True)


def test_a_read_only_store_writes_nothing(url: str) -> None:
    with open_store(url) as store:
        store.put_model(MODEL)
    with open_store(url, read_only=True) as store:
        assert store.model("tiny") == MODEL
        with pytest.raises(StoreReadOnlyError, match="for reading only"):
            store.put_cluster(CLUSTER)
        assert store.clusters() == []
    path = locate(url).path
    if path is not None:
        assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_foreign_table_of_our_name_stops_the_migration_whole(empty_url: str, empty: Engine) -> None:
    execute(empty, "CREATE TABLE tunings (id INTEGER)")
    with pytest.raises(StoreError, match=r"tunings.* already exists"):
        open_store(empty_url)
    with pytest.raises(StoreError, match="nothing of autotune"):
        open_store(empty_url, read_only=True)
    with empty.connect() as connection:
        assert not empty.dialect.has_table(connection, "models")


@contextmanager
def studies(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Optuna's storage, as older releases opened it in the same database."""
    storage = optuna.storages.RDBStorage(url)
    yield storage
    storage.remove_session()
    storage.engine.dispose()


@pytest.mark.parametrize("ours_first", [True, False])
def test_optunas_tables_do_no_harm_in_the_same_database(empty_url: str, ours_first: bool) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study_url = locate(empty_url).url.render_as_string(hide_password=False)
    if ours_first:
        open_store(empty_url).close()
    with studies(study_url) as storage:
        study = optuna.create_study(storage=storage, study_name="tuning-1", direction="maximize")
        trial = study.ask()
        trial.suggest_int("tp", 1, 8)
        study.tell(trial, 2.5)
    with open_store(empty_url) as store:
        store.put_model(MODEL)
    with studies(study_url) as storage:
        assert optuna.load_study(study_name="tuning-1", storage=storage).best_value == 2.5
    assert check(empty_url).sound
    assert stats(empty_url).rows["models"] == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "cannot be read"),
        ("postgresql://me:se@cret:word@host:port/x", "cannot be read"),
        ("mysql://me:secret@host/x", "driver 'mysql' is not supported"),
        ("postgresql+asyncpg://me:secret@host/x", "is not supported"),
        ("sqlite://", "must be a plain file"),
        ("sqlite:///:memory:", "must be a plain file"),
        ("sqlite:////nowhere/at/all/a.db", "directory does not exist"),
        ("sqlite:////", "is a directory"),
        ("postgresql://me:secret@127.0.0.1:1/x?password=secret", "127.0.0.1:1/x"),
    ],
)
def test_what_cannot_be_opened_says_why_and_keeps_the_password(url: str, message: str) -> None:
    for read_only in (False, True):
        with pytest.raises(StoreError, match=message) as caught:
            open_store(url, read_only=read_only)
        assert "secret" not in str(caught.value)
        assert "cret:word" not in str(caught.value)


def test_a_wrong_password_is_not_repeated(postgres: PostgresServer) -> None:
    with pytest.raises(StoreError, match="authentication failed") as caught:
        open_store(postgres.url(password="hunter2"))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError, match="no_such_database"):
        open_store(postgres.url("no_such_database"))
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "content", [b"no database at all, but long enough to be one" * 100, b"SQLite format 3\x00 but"]
)
def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path, content: bytes, read_only: bool) -> None:
    path = tmp_path / "broken.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"broken\.db is not a usable SQLite database"):
        open_store(f"sqlite:///{path}", read_only=read_only)
    assert path.read_bytes() == content


def test_a_path_with_odd_characters_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "100 % of #1" / "å db.db"
    path.parent.mkdir()
    with open_store(f"sqlite:///{path}") as store:
        store.put_model(MODEL)
    with sqlite3.connect(path) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "tunings" in names
    assert [each.name for each in path.parent.iterdir()] == ["å db.db"]


def test_a_postgres_server_that_only_reads(postgres: PostgresServer) -> None:
    name = postgres.create_database()
    url = postgres.url(name)
    open_store(url).close()
    with open_store(url) as writable:
        postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        writable.close()
        with pytest.raises(StoreReadOnlyError, match="cannot be written"):
            writable.put_model(MODEL)
    with pytest.raises(StoreReadOnlyError, match="cannot be written"):
        open_store(url)
    with open_store(url, read_only=True) as store:
        assert store.models() == []
    empty = postgres.create_database()
    postgres.execute(f"ALTER DATABASE {empty} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnlyError, match="cannot be written"):
        open_store(postgres.url(empty))


def as_nobody(work: Callable[[str], str], path: Path) -> str:
    """What work on a database comes to in a process that permissions hold for: to root nothing is read-only."""
    return run_apart(do_as_nobody, work, f"sqlite:///{path}")


def do_as_nobody(work: Callable[[str], str], url: str) -> str:
    with tempfile.TemporaryDirectory() as directory:  # to have imported all that it needs
        trial = f"sqlite:///{directory}/a.db"
        write(trial)
        copy(trial)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(*[nobody.pw_gid] * 3)
        os.setresuid(*[nobody.pw_uid] * 3)
    try:
        return work(url)
    except StoreError as error:
        return f"{type(error).__name__}: {error}"


def write(url: str) -> str:
    with open_store(url) as store:
        store.put_model(MODEL)
    return "written"


def read(url: str) -> str:
    with open_store(url, read_only=True) as store:
        return str([model.name for model in store.models()])


def copy(url: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return f"{backup(url, Path(directory) / 'copy').rows['models']} of {read(url)}"


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory that others may enter; pytest's own are closed to them."""
    directory = Path(tempfile.mkdtemp(prefix="autotune-shelf-"))
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


@pytest.mark.parametrize(("directory_mode", "file_mode"), [(0o555, 0o444), (0o777, 0o444), (0o555, 0o666)])
def test_a_read_only_file_can_be_read_and_says_that_it_cannot_be_written(
    shelf: Path, directory_mode: int, file_mode: int
) -> None:
    path = shelf / "autotune.db"
    write(f"sqlite:///{path}")
    before = path.read_bytes()
    path.chmod(file_mode)
    shelf.chmod(directory_mode)
    refusal = as_nobody(write, path)
    assert refusal.startswith("StoreReadOnlyError"), refusal
    assert f"{path} cannot be written" in refusal
    assert as_nobody(read, path) == "['tiny']"
    assert as_nobody(copy, path) == "1 of ['tiny']"
    assert path.read_bytes() == before


def test_a_read_only_directory_without_a_database(shelf: Path) -> None:
    shelf.chmod(0o555)
    refusal = as_nobody(write, shelf / "new.db")
    assert refusal.startswith("StoreReadOnlyError"), refusal


def test_a_file_that_may_not_be_read(shelf: Path) -> None:
    path = shelf / "autotune.db"
    write(f"sqlite:///{path}")
    path.chmod(0)
    for work in (read, write):
        assert as_nobody(work, path) == f"StoreError: {path} cannot be opened: no access"
