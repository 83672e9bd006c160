"""Records of a fleet to fill a store with, and the walk of a job through it."""

from __future__ import annotations

from store_records import CLUSTER, COLLECTIVE_REQUEST, DEVICE, FINGERPRINT, MODEL, MOMENT, WORKLOAD, trial, tuning

from autotune.ports.fleet import FleetStore
from autotune.specs import (
    FailureKind,
    Job,
    JobPurpose,
    MemberReport,
    Node,
    ProbeRequest,
    RankReport,
    StepRequest,
    Trial,
    Tuning,
)

POOL = CLUSTER.name
LONG_S = 3600.0
OVER_S = -1.0  # a lease of this length ran out before it was given


def node(name: str, session: str = "s1", **changes: object) -> Node:
    """A node of POOL whose session is that of its worker."""
    new = Node(
        name=name, pool=POOL, address=f"10.0.0.{len(name)}", topology="rack1/switch2", device=DEVICE, slots=4, nics=2,
        cores=64, memory_bytes=2**40, fingerprint_key=FINGERPRINT.key, environment_key=FINGERPRINT.environment_key,
        session=session, registered_at=MOMENT, heartbeat_at=MOMENT,
    )  # fmt: skip
    return new.model_copy(update=changes)


def job(job_id: str, **changes: object) -> Job:
    """A queued profile job on CLUSTER, without tuning."""
    new = Job(
        id=job_id, purpose=JobPurpose.PROFILE, pool=POOL, cluster=CLUSTER, request=COLLECTIVE_REQUEST, principal="ada",
        environment_key=FINGERPRINT.environment_key, deadline_s=120.0, created_at=MOMENT,
    )  # fmt: skip
    return new.model_copy(update=changes)


def step_request(of: Trial) -> ProbeRequest:
    """What measures a trial."""
    return StepRequest(model=MODEL, workload=WORKLOAD, plan=of.plan)


def trial_job(job_id: str, of: Trial, **changes: object) -> Job:
    """A queued job that runs a trial."""
    purpose = {"purpose": JobPurpose.TRIAL, "request": step_request(of)}
    return job(job_id, tuning_id=of.tuning_id, trial_id=of.id, **purpose, **changes)


def fleet_tuning(tuning_id: str = "tuning-1", principal: str = "ada", **changes: object) -> Tuning:
    """A tuning on POOL that nobody has claimed."""
    return tuning(tuning_id, pool=POOL, principal=principal, owner="", **changes)


def report(failure: FailureKind | None = None, **changes: object) -> MemberReport:
    """What a node of four ranks reports: all went well, or rank 0 failed so."""
    first = RankReport(
        rank=0, report=None if failure else {"time_s": 0.1}, failure=failure, message="m", log_tail="\x00"
    )
    good = tuple(RankReport(rank=rank, report={"time_s": 0.1}) for rank in range(1, 4))
    return MemberReport(ranks=(first, *good), kept_warm=True, setup_s=1.0, wall_s=2.5).model_copy(update=changes)


def pair(store: FleetStore) -> None:
    """Two nodes, a and b."""
    for name in ("a", "b"):
        store.register_node(node(name))
    store.put_fingerprint(FINGERPRINT)


def granted(store: FleetStore, new: Job, nodes: tuple[str, ...] = ("a", "b"), **changes: object) -> Job:
    """A new job with its nodes leased."""
    store.create_job(new)
    lease = {"lease_s": LONG_S, "world_id": f"world-{new.id}", "warm": False} | changes
    found = store.grant(new.id, nodes, **lease)  # type: ignore[arg-type]
    assert found is not None
    return found


def reported(store: FleetStore, found: Job) -> Job:
    """The job after all of its members have begun and reported."""
    for member in found.members:
        session = store.node(member.node).session
        assert store.start_member(found.id, found.token, member.node, session, lease_s=LONG_S) is not None
        after = store.report_member(found.id, found.token, member.node, session, report())
        assert after is not None
        found = after
    return found


def live_tuning(store: FleetStore, tuning_id: str = "tuning-1") -> Trial:
    """A claimed tuning of a fleet in the store, which has begun; gives its first trial, not yet started."""
    store.submit_tuning(fleet_tuning(tuning_id), sharing_key=f"sharing-{tuning_id}")
    store.admit_tunings(100)
    assert store.claim_tuning(tuning_id, "tuner", lease_s=LONG_S) is not None
    return trial(0, tuning_id)
