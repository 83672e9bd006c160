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
from autotune.specs.model import (
    Indexer,
    LatentAttention,
    LinearAttention,
    Mixer,
    ModelSpec,
    Norm,
    Position,
    Recurrence,
)
from autotune.specs.plan import Module, Plan, Recompute, Schedule
from autotune.specs.profile import ComputeFit, LinkFit, Profile
from autotune.specs.tuning import Budget, SamplerName, Space, Trial, TrialState, Tuning, TuningState
from autotune.specs.workload import (
    Attention,
    CrossEntropy,
    DType,
    Fp8Recipe,
    FrameworkName,
    Norms,
    Optimizer,
    Workload,
)

__all__ = [
    "ApiKey", "Attention", "Basis", "BestEntry", "Budget", "BytesByPart", "ClusterSpec", "CollectiveOp",
    "CollectiveReading", "CollectiveRequest", "ComputeFit", "CrossEntropy", "DType", "Device", "DeviceKind",
    "Estimate", "EventKind", "Failure", "FailureKind", "Fingerprint", "Fp8Recipe", "FrameworkName", "Indexer", "Job",
    "JobMember", "JobPurpose", "JobState", "LatentAttention", "LayerPart", "LayerReading", "LayerRequest",
    "LinearAttention", "Link", "LinkFit", "MemberOrder", "MemberReport", "MemberState", "Mixer", "ModelSpec",
    "Module", "NearEntry", "Node", "NodeIncident", "NodeState", "Norm", "Norms", "Optimizer", "Plan", "Position",
    "ProbeOutcome", "ProbeProgress", "ProbeRequest", "Profile", "RankReading", "RankReport", "Recompute",
    "Recurrence", "Role", "RunnerUp", "SamplerName", "Schedule", "SecondsByPart", "Space", "Spec", "StepReading",
    "StepRequest", "Trial", "TrialState", "Tuning", "TuningEvent", "TuningState", "Workload",
]  # fmt: skip
