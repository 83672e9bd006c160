"""Nodes: who registered, who is alive, whom we trust, and what they did."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from autotune.errors import StoreConflictError, UnknownNameError
from autotune.specs import Device, JobState, Node, NodeIncident, NodeState
from autotune.specs.command import CommandOffer
from autotune.specs.fleet import LOCAL
from storage.database.session import NAMES_SHOWN, RacedError, SessionStore, again, database_now, flush_new
from storage.fleet.jobs import end_queued, lock_jobs, lose_members
from storage.fleet.tables import JobRow, LeaseRow, MemberRow, NodeIncidentRow, NodeRow, of_pool
from storage.tunings.rows import values

INVENTORY = (
    "pool", "address", "topology", "slots", "nics", "cores", "memory_bytes", "fingerprint_key", "environment_key",
    "session", "lost_after_s",
)  # fmt: skip
STANDING = ("name", "reason", "failures", "world_id", "registered_at", "heartbeat_at")


class NodeStore(SessionStore):
    """Nodes and their incidents."""

    def register_node(self, node: Node) -> Node:
        """Stores a node and evicts an older session of its name: its leases are lost and its warm world forgotten.

        The members that the older session ran are LOST at once. State, reason and failures of a known node stay.
        """
        return again(lambda: self._register(node))

    def retire_node(self, name: str, session: str) -> None:
        """The worker of that session ends: its leases are lost, and the node gets none until one registers again."""
        again(lambda: self._retire(name, session))

    def forget_node(self, name: str, *, silent_s: float) -> None:
        """Takes a dead node out of the list until a worker registers it again. Its state stays, and rows that name it.

        Its queued health probes end: nobody else may run them.

        Raises UnknownNameError, and StoreConflictError where a job holds it or its worker was heard of in the last
        `silent_s` seconds.
        """
        with self.writing() as session:
            queued = select(JobRow.id).where(JobRow.only_node == name, JobRow.state == JobState.QUEUED.value)
            probes = lock_jobs(session, session.scalars(queued).all())
            gang = lock_gang(session, [name])
            row = next((row for row in gang if row.name == name and row.forgotten_at is None), None)
            row = row or _unknown(session, name)
            job_id, now = _holder(session, name), database_now(session)
            if job_id is not None:
                raise StoreConflictError(f"node {name!r} is held by job {job_id!r}")
            silence_s = (now - row.heartbeat_at).total_seconds()
            if row.session and silence_s <= silent_s:
                raise StoreConflictError(
                    f"node {name!r} lives: it was heard of {silence_s:.0f} s ago; end its worker, or wait until it "
                    f"has been silent for {silent_s:.0f} s"
                )
            forget_worlds(gang, {row.world_id})
            row.session, row.forgotten_at = "", now
            for probe in probes:
                if probe.state == JobState.QUEUED.value:
                    end_queued(probe, now)

    def nodes(self, pool: str | None = None) -> Sequence[Node]:
        """Nodes by name."""
        query = select(NodeRow).where(NodeRow.forgotten_at.is_(None), of_pool(NodeRow.pool, pool))
        with self.reading() as session:
            found = [node_of(row) for row in session.scalars(query)]
        return sorted(found, key=lambda node: node.name)

    def local_pools(self) -> Sequence[str]:
        """The pools of single processes, also of those that died before they could discard theirs."""
        with self.reading() as session:
            return sorted(session.scalars(select(NodeRow.pool).where(NodeRow.pool.startswith(LOCAL)).distinct()))

    def discard_pool(self, pool: str) -> None:
        """Deletes a single process's pool: its node and its jobs, not what they measured. Its trials stay as they are.

        Raises ValueError for a fleet's pool.
        """
        if not pool.startswith(LOCAL):
            raise ValueError(f"pool {pool!r} is a fleet's")
        jobs = select(JobRow.id).where(JobRow.pool == pool)
        with self.writing() as session:
            session.execute(delete(LeaseRow).where(LeaseRow.job_id.in_(jobs)))
            session.execute(delete(MemberRow).where(MemberRow.job_id.in_(jobs)))
            session.execute(delete(JobRow).where(JobRow.pool == pool))
            session.execute(delete(NodeRow).where(NodeRow.pool == pool))

    def node(self, name: str) -> Node:
        """The node of that name. Raises UnknownNameError."""
        with self.reading() as session:
            row = session.get(NodeRow, name)
            return node_of(row if row is not None and row.forgotten_at is None else _unknown(session, name))

    def renew_node(self, name: str, session: str) -> bool:
        """Renews the heartbeat; False if the session is not the node's any more."""
        with self.writing() as transaction:
            return renew_session(transaction, name, session)

    def set_node_state(self, name: str, state: NodeState, reason: str) -> None:
        """Quarantines or releases a node; a release sets its failures to zero. Raises UnknownNameError."""
        with self.writing() as session:
            row = _locked(session, name)
            row.state, row.reason = state.value, reason
            if state is NodeState.READY:
                row.failures = 0

    def blame_node(self, incident: NodeIncident, *, quarantine_at: int) -> Node:
        """Records an incident, adds one to the failures, and quarantines at that many. Returns the node."""
        with self.writing() as session:
            row = _locked(session, incident.node)
            session.add(NodeIncidentRow(**incident.model_dump()))
            row.failures += 1
            if row.failures >= quarantine_at and row.state != NodeState.QUARANTINED:
                row.state, row.reason = NodeState.QUARANTINED.value, incident.message
            session.flush()
            return node_of(row)

    def record_incident(self, incident: NodeIncident) -> None:
        """Records what happened to a node, and blames it for nothing. Raises UnknownNameError."""
        with self.writing() as session:
            _locked(session, incident.node)
            session.add(NodeIncidentRow(**incident.model_dump()))

    def clear_blame(self, names: Collection[str]) -> None:
        """Sets the failures of nodes to zero: a job on them went well."""
        blamed = select(NodeRow).where(NodeRow.name.in_(names), NodeRow.failures > 0).order_by(NodeRow.name)
        with self.writing() as session:
            for row in session.scalars(blamed.with_for_update(key_share=True)):
                row.failures = 0

    def incidents(self, node: str | None = None, limit: int = 50) -> Sequence[NodeIncident]:
        """The newest incidents, newest first."""
        query = select(NodeIncidentRow) if node is None else select(NodeIncidentRow).where(NodeIncidentRow.node == node)
        names = NodeIncident.model_fields
        with self.reading() as session:
            rows = session.scalars(query.order_by(NodeIncidentRow.id.desc()).limit(limit))
            return [NodeIncident(**{name: getattr(row, name) for name in names}) for row in rows]

    def _register(self, node: Node) -> Node:
        with self.writing() as session:
            held = _Held(session, node.name)
            row = held.row
            if row is None:
                row = _new_row(session, node)
            elif row.session != node.session:
                held.take_away()
            for name, value in inventory_columns(node).items():
                setattr(row, name, value)
            row.registered_at = row.heartbeat_at = database_now(session)
            row.forgotten_at = None
            session.flush()
            return node_of(row)

    def _retire(self, name: str, session: str) -> None:
        with self.writing() as transaction:
            held = _Held(transaction, name)
            if held.row is not None and held.row.session == session:
                held.take_away()
                held.row.session = ""


class _Held:
    """A node's row (None without one) and what its worker holds, locked in the order that everybody keeps."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._job_id = _holder(session, name)
        self._jobs = lock_jobs(session, [self._job_id]) if self._job_id else []
        self._gang = lock_gang(session, [name])
        self.row = next((row for row in self._gang if row.name == name), None)

    def take_away(self) -> None:
        """Its leases are lost and its warm world is forgotten."""
        if _holder(self._session, self._name) != self._job_id:
            raise RacedError(f"node {self._name!r} is being given away all the time")
        if self.row is not None:
            forget_worlds(self._gang, {self.row.world_id})
        lose_members(self._jobs, [self._name])


def inventory_columns(node: Node) -> dict[str, Any]:
    """The columns that each registration replaces."""
    commands = json.dumps([offer.to_data() for offer in node.commands], sort_keys=True)
    return values(node, INVENTORY) | {"device_json": node.device.to_json(), "commands_json": commands}


def node_of(row: NodeRow) -> Node:
    """The node of a row."""
    return Node(
        **values(row, (*INVENTORY, *STANDING)),
        device=Device.from_json(row.device_json),
        state=NodeState(row.state),
        commands=_offers(row.commands_json) if row.commands_json != "[]" else (),
    )


@lru_cache(maxsize=256)
def _offers(text: str) -> tuple[CommandOffer, ...]:
    """Read once: nodes are listed often, and seldom offer other programs than before."""
    return tuple(TypeAdapter(tuple[CommandOffer, ...]).validate_json(text))


def lock_gang(session: Session, names: Collection[str]) -> list[NodeRow]:
    """Those of the nodes that there are, and the nodes that share a warm world with one; locked, by name."""
    worlds = select(NodeRow.world_id).where(NodeRow.name.in_(names), NodeRow.world_id != "")
    query = select(NodeRow).where(or_(NodeRow.name.in_(names), NodeRow.world_id.in_(worlds))).order_by(NodeRow.name)
    locked = query.with_for_update(key_share=True).execution_options(populate_existing=True)
    return list(session.scalars(locked))


def forget_worlds(gang: Iterable[NodeRow], world_ids: Collection[str]) -> None:
    """The nodes that hold one of the worlds forget it: a world that lost a node is useless."""
    for row in gang:
        if row.world_id in world_ids:
            row.world_id = ""


def renew_session(session: Session, name: str, of: str) -> bool:
    """Renews a node's heartbeat if `of` is its session; says whether it is."""
    ours = update(NodeRow).where(NodeRow.name == name, NodeRow.session == of)
    changed = session.execute(ours.values(heartbeat_at=database_now(session)).returning(NodeRow.name))
    return changed.first() is not None


def _holder(session: Session, node: str) -> str | None:
    return session.scalar(select(LeaseRow.job_id).where(LeaseRow.node == node))


def _new_row(session: Session, node: Node) -> NodeRow:
    now = database_now(session)
    row = NodeRow(name=node.name, **inventory_columns(node), registered_at=now, heartbeat_at=now)
    row.state, row.reason, row.failures, row.world_id = node.state.value, node.reason, node.failures, node.world_id
    session.add(row)
    flush_new(session, f"node {node.name!r} is being registered by somebody else", RacedError)
    return row


def _locked(session: Session, name: str) -> NodeRow:
    query = select(NodeRow).where(NodeRow.name == name, NodeRow.forgotten_at.is_(None))
    return session.scalar(query.with_for_update(key_share=True)) or _unknown(session, name)


def _unknown(session: Session, name: str) -> NodeRow:
    known = select(NodeRow.name).where(NodeRow.forgotten_at.is_(None))
    raise UnknownNameError("node", name, session.scalars(known.limit(NAMES_SHOWN)))
