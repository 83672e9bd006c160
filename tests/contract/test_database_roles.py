"""deploy/postgres/roles.sql and `autotune db grant` on a server of their own: what each role may do, and may not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from commands import Command
from fleet_records import LONG_S, POOL, job, node, pair, report, trial_job
from fleet_records import live_tuning as live
from services import PostgresServer, postgres_binaries, postgres_server
from store_records import CLUSTER, COLLECTIVE_OUTCOME, FINGERPRINT, step_reading

from autotune.specs import FailureKind, JobPurpose, JobState, NodeIncident, NodeState, ProbeOutcome, TrialState
from storage import SqlStore, open_store
from storage.care.maintenance import migrate
from storage.care.roles import grant_node

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/postgres/roles.sql"
OWNER_PASSWORD, NODE_PASSWORD = "of-the-owner", "of-a-node"
STEP = ProbeOutcome(readings=(step_reading(),), wall_s=2.0, gpu_s=8.0, setup_s=1.0)


@dataclass(frozen=True, slots=True)
class Roles:
    """A server with both roles; the URLs of the database for each."""

    server: PostgresServer
    owner: str
    node: str


def run_script(server: PostgresServer, folder: Path, owner: str, of_node: str) -> subprocess.CompletedProcess[str]:
    """psql with the script, as an operator runs it."""
    files = {"OWNER_PASSWORD_FILE": folder / "owner", "NODE_PASSWORD_FILE": folder / "node"}
    for path, password in zip(files.values(), (owner, of_node), strict=True):
        path.write_text(password + "\n")
    words = [server.binaries / "psql", "-X", "-q", "-d", server.url(), "-f", SCRIPT]
    environment = {"PATH": "/usr/bin:/bin", **{name: str(path) for name, path in files.items()}}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """A server whose superuser is another one, as that of the image is."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed")
    with postgres_server(binaries, superuser="postgres") as server:
        for passwords in (("first", "first"), (OWNER_PASSWORD, NODE_PASSWORD)):  # the second run changes passwords
            done = run_script(server, tmp_path_factory.mktemp("passwords"), *passwords)
            assert (done.returncode, done.stderr) == (0, "")
        owner = server.url("autotune", user="autotune", password=OWNER_PASSWORD)
        migrate(owner)
        grant_node(owner, "autotune_node")
        yield Roles(server, owner, server.url("autotune", user="autotune_node", password=NODE_PASSWORD))


def test_a_password_that_is_missing_stops_the_script(roles: Roles, tmp_path: Path) -> None:
    done = run_script(roles.server, tmp_path, OWNER_PASSWORD, "")
    assert done.returncode != 0
    assert "the file of a password is empty" in done.stderr
    with psycopg.connect(roles.node):
        """The old one is in force."""


def test_passwords_are_not_in_the_servers_log(roles: Roles) -> None:
    log = (roles.server.directory / "log").read_text()
    assert OWNER_PASSWORD not in log
    assert NODE_PASSWORD not in log


REACH_OUT = (
    "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null'",
    "COPY clusters FROM PROGRAM 'true'",
    "COPY (SELECT 1) TO '/tmp/autotune-was-here'",
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT lo_import('/etc/passwd')",
    "CREATE ROLE another",
    "ALTER ROLE autotune_node SUPERUSER",
    "CREATE DATABASE another",
    "ALTER SYSTEM SET max_connections = 1",
    "SELECT rolpassword FROM pg_authid",
)
BEYOND_A_NODE = (
    "SELECT secret_hash FROM api_keys",
    "INSERT INTO api_keys VALUES ('k', 'n', 'admin', 'h', now(), NULL, NULL)",
    "SELECT * FROM idempotency_keys",
    "SELECT * FROM best_known",
    "SELECT * FROM profiles",
    "DROP TABLE jobs",
    "ALTER TABLE jobs ADD COLUMN more text",
    "TRUNCATE jobs",
    "DELETE FROM jobs",
    "DELETE FROM tunings",
    "DELETE FROM nodes",
    "UPDATE tunings SET principal = 'me'",
    "UPDATE tuning_trials SET plan_json = '{}'",
    "UPDATE step_measurements SET step_time_s = 0",
    "UPDATE autotune_schema SET version_num = '0000'",
    "CREATE TABLE mine (id int)",
    "CREATE TEMPORARY TABLE mine (id int)",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "SET ROLE autotune",
)


def refused(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement)  # type: ignore[arg-type]


@pytest.mark.parametrize("statement", [*REACH_OUT, *BEYOND_A_NODE])
def test_a_node_may_not(roles: Roles, statement: str) -> None:
    refused(roles.node, statement)


@pytest.mark.parametrize("statement", REACH_OUT)
def test_the_owner_may_not(roles: Roles, statement: str) -> None:
    refused(roles.owner, statement)


@pytest.fixture
def stores(roles: Roles) -> Iterator[tuple[SqlStore, SqlStore]]:
    """The database opened by the owner and by a node, as their processes open it."""
    with open_store(roles.owner) as owner, open_store(roles.node) as of_node:
        yield owner, of_node


def test_a_node_does_its_jobs(stores: tuple[SqlStore, SqlStore]) -> None:
    owner, of_node = stores
    of_node.put_cluster(CLUSTER)
    assert CLUSTER in of_node.clusters()
    pair(of_node)
    first = live(owner)
    owner.create_job(trial_job("trial", first), trial=first, expected_owner="tuner")
    owner.create_job(job("profile"))
    for number, (job_id, outcome) in enumerate((("trial", STEP), ("profile", COLLECTIVE_OUTCOME))):
        assert job_id in {each.id for each in of_node.queued_jobs(POOL, most_each=5)}
        found = of_node.grant(job_id, ["a", "b"], lease_s=LONG_S, world_id="w", warm=bool(number))
        assert found is not None
        for name in ("a", "b"):
            assert of_node.start_member(job_id, found.token, name, "s1", lease_s=LONG_S) is not None
            assert of_node.renew_member(job_id, found.token, name, "s1", lease_s=LONG_S, endpoint="a:1").go_on
            after = of_node.report_member(job_id, found.token, name, "s1", report())
        assert after is not None
        assert after.state is JobState.REPORTED
        ended = of_node.end_job(
            job_id, found.token, outcome, failure=None, fingerprint_key=FINGERPRINT.key, warm_nodes=("a", "b")
        )
        assert ended is not None
    assert owner.trials(first.tuning_id)[0].state is TrialState.COMPLETE
    assert owner.tuning(first.tuning_id).gpu_s_spent == STEP.gpu_s
    assert "ada" in of_node.gpu_s_by_principal(owner.tuning(first.tuning_id).created_at)


def test_a_node_keeps_the_house(stores: tuple[SqlStore, SqlStore]) -> None:
    owner, of_node = stores
    of_node.register_node(node("alone"))
    owner.create_job(job("lost"))
    assert of_node.grant("lost", ["alone"], lease_s=LONG_S, world_id="w", warm=False) is not None
    of_node.register_node(node("alone", "s2"))  # another worker takes its name
    assert of_node.renew_node("alone", "s2")
    lost = owner.job("lost")
    assert lost.state is JobState.REPORTED
    retry = job("again", attempt=2, purpose=JobPurpose.HEALTH, only_node="alone")
    failed = COLLECTIVE_OUTCOME.model_copy(update={"readings": ()})
    assert of_node.end_job("lost", lost.token, failed, failure=None, retry=retry) is not None
    incident = NodeIncident(node="alone", at=of_node.now(), kind=FailureKind.LOST, message="it went", job_id="lost")
    assert of_node.blame_node(incident, quarantine_at=1).state is NodeState.QUARANTINED
    of_node.set_node_state("alone", NodeState.READY, "")
    of_node.clear_blame(["alone"])
    assert of_node.incidents("alone")[0].message == "it went"
    of_node.create_job(job("health", purpose=JobPurpose.HEALTH, only_node="alone"))
    of_node.retire_node("alone", "s2")


@pytest.mark.parametrize("role", ["autotune", "postgres", "nobody-of-that-name"])
def test_who_may_everything_or_is_not_there_is_no_node(roles: Roles, autotune: Command, role: str) -> None:
    done = autotune("db", "grant", role, "--db", roles.owner, "--json")
    assert (done.status, done.data["error"]["value"]) == (2, role)


def test_a_file_has_no_roles(autotune: Command, tmp_path: Path) -> None:
    done = autotune("db", "grant", "autotune_node", "--db", f"sqlite:///{tmp_path / 'a.db'}")
    assert (done.status, "only PostgreSQL has roles" in done.err) == (2, True)


def test_the_command_says_what_it_granted(roles: Roles, autotune: Command) -> None:
    done = autotune("db", "grant", "autotune_node", "--db", roles.owner, "--json")
    assert done.status == 0
    assert "api_keys" not in done.data["rights"]
    assert done.data["rights"]["leases"] == "SELECT, INSERT, DELETE"
