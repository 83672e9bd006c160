"""Frozen, strict records: the words of the project as types. No logic beyond validation and keys."""

from autotune.specs.base import Spec
from autotune.specs.cluster import ClusterSpec, Device, DeviceKind, Link
from autotune.specs.estimate import Basis, BytesByPart, Estimate, SecondsByPart
from autotune.specs.fleet import (
    ApiKey,
    EventKind,
    Job,
    JobMember,
    JobPurpose,
    JobState,
    MemberOrder,
    MemberReport,
    MemberState,
    Node,
    NodeIncident,
    NodeState,
    RankReport,
    Role,
    TuningEvent,
)
from autotune.specs.knowledge import BestEntry, NearEntry, RunnerUp
from autotune.specs.measurement import (
    CollectiveOp,
    CollectiveReading,
    CollectiveRequest,
    Failure,
    FailureKind,
    Fingerprint,
    LayerPart,
    LayerReading,
    LayerRequest,
    ProbeOutcome,
    ProbeProgress,
    ProbeRequest,
    RankReading,
    StepReading,
    StepRequest,
)
from autotune.specs.model import LatentAttention, ModelSpec, Norm, Position
from autotune.specs.plan import Plan, Recompute, Schedule
from autotune.specs.profile import ComputeFit, LinkFit, Profile
from autotune.specs.software import Attention, FrameworkName, Software
from autotune.specs.tuning import Budget, SamplerName, Space, Trial, TrialState, Tuning, TuningState
from autotune.specs.workload import DType, Optimizer, Workload

__all__ = [
    "ApiKey", "Attention", "Basis", "BestEntry", "Budget", "BytesByPart", "ClusterSpec", "CollectiveOp",
    "CollectiveReading", "CollectiveRequest", "ComputeFit", "DType", "Device", "DeviceKind", "Estimate", "EventKind",
    "Failure", "FailureKind", "Fingerprint", "FrameworkName", "Job", "JobMember", "JobPurpose", "JobState",
    "LatentAttention", "LayerPart", "LayerReading", "LayerRequest", "Link", "LinkFit", "MemberOrder", "MemberReport",
    "MemberState", "ModelSpec", "NearEntry", "Node", "NodeIncident", "NodeState", "Norm", "Optimizer", "Plan",
    "Position", "ProbeOutcome", "ProbeProgress", "ProbeRequest", "Profile", "RankReading", "RankReport", "Recompute",
    "Role", "RunnerUp", "SamplerName", "Schedule", "SecondsByPart", "Software", "Space", "Spec", "StepReading",
    "StepRequest", "Trial", "TrialState", "Tuning", "TuningEvent", "TuningState", "Workload",
]  # fmt: skip
