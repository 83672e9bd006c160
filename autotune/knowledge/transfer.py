"""Transfer: from what was measured elsewhere to an estimate for a question that nobody measured.

The search's posterior does the work: the known tuning's trials are transfers, its profile gives the speeds of kernels
and links. What nobody measured is stated in the interval: on another number of nodes the network is another one, of
which published clusters show the range; and what the transfers showed but the posterior does not explain may stay or
go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.cost.capacity import MAY_FIT
from autotune.cost.estimate import NINETY_PERCENT, estimate_table
from autotune.cost.framework import Framework
from autotune.cost.table import PlanTable
from autotune.search.core import NOT_THE_PLANS_FAULT, Search
from autotune.search.physics import PARAMETERS, behaviour
from autotune.search.posterior import Posterior, TransferObservation
from autotune.search.ranking import peak_memory_bytes
from autotune.search.space import Runtime
from autotune.search.transfer import Shown, transfers_of
from autotune.specs import ClusterSpec, Estimate, FailureKind, ModelSpec, Plan, Profile, Trial, Workload

NETWORK_SLOWER, NETWORK_FASTER = 20.0, 4.0
"""A link between nodes may be this much slower or faster on one number of nodes than on another (90 %)."""

OTHER_MODEL_SD = 0.06
"""What an estimate is off by on another model than the one that taught it."""

NETWORK_TERMS = ("gradients", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """An estimate for a question from measurements of another one. 90 % interval; nothing here was measured.

    `trial_gpu_s` is what a trial of the plan is expected to cost.
    """

    plan: Plan
    tokens_per_s_per_gpu: float
    interval: tuple[float, float]
    p_fits: float
    estimate: Estimate | None
    trial_gpu_s: float

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "plan": self.plan.to_data(),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "interval": list(self.interval),
            "interval_probability": 0.9,
            "p_fits": self.p_fits,
            "estimate": self.estimate.to_data() if self.estimate else None,
            "trial_gpu_s": self.trial_gpu_s,
            "source": "estimate",
        }


def taught(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    trials: Sequence[Trial],
    profile: Profile | None,
    framework: Framework | None = None,
) -> list[TransferObservation]:
    """What the trials of a tuning teach about other ones: each against its estimate.

    Args:
        model: of the tuning.
        cluster: of the tuning.
        workload: of the tuning.
        trials: its trials; lost and cancelled ones say nothing, pruned ones only of memory.
        profile: of its cluster.
        framework: whose habits the estimates assume; the workload's by default.
    """
    shown: dict[Plan, list[Trial]] = {}
    for trial in trials:
        useless = trial.failure is not None and trial.failure.kind in NOT_THE_PLANS_FAULT
        if not useless and (trial.reading is not None or trial.failure is not None):
            shown.setdefault(trial.plan, []).append(trial)
    if not shown:
        return []
    plans, pooled = list(shown), []
    for repeats in shown.values():
        readings = [trial.reading for trial in repeats if trial.reading is not None]
        speeds = [item.tokens_per_s_per_gpu for item in readings if not item.pruned]
        failures = [trial.failure.kind for trial in repeats if trial.failure is not None]
        pooled.append(
            Shown(
                tokens_per_s_per_gpu=float(np.mean(speeds)) if speeds else None,
                peak_bytes=max((float(peak_memory_bytes(item, cluster)) for item in readings), default=None),
                out_of_memory=FailureKind.OOM in failures,
            )
        )
    estimates = estimate_table(model, cluster, workload, PlanTable.of(plans), profile, framework)
    return transfers_of(plans, estimates, pooled)


def moved_profile(profile: Profile, known: ClusterSpec, asked: ClusterSpec) -> Profile | None:
    """A cluster's profile for another number of the same nodes; None where the hardware is another one.

    A link between nodes is taken to reach on fewer or more nodes what it reached: the widest groups shrink with the
    cluster.
    """
    same = ("device", "intra", "inter", "nics_per_node", "node_cores")
    if any(getattr(known, name) != getattr(asked, name) for name in same if not (name == "inter" and not asked.inter)):
        return None
    links = []
    for link in profile.links:
        size = min(link.group_size, asked.devices // link.stride)
        if size >= 2 and (size * link.stride > asked.gpus_per_node) == link.crosses_nodes:
            links.append(link.model_copy(update={"group_size": size}))
    return profile.model_copy(update={"cluster_key": asked.key, "links": tuple(links)})


def carry(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    transfers: Sequence[TransferObservation],
    profile: Profile | None,
    *,
    measured_network: bool,
    same_model: bool = True,
    plans: Sequence[Plan] | None = None,
    runtime: Runtime = Runtime.TORCH,
    framework: Framework | None = None,
) -> Carried | None:
    """The best plan to expect for a question, with what is believed of it; None where nothing is believed to fit.

    Args:
        model: asked for.
        cluster: asked for.
        workload: asked for.
        transfers: of the known tuning.
        profile: for the asked cluster (`moved_profile`).
        measured_network: whether the links of the asked number of nodes were measured.
        same_model: whether the transfers are of this model.
        plans: to choose from; by default all legal ones.
        runtime: whose legality rules hold.
        framework: whose habits the estimates assume; the workload's by default.
    """
    search = Search(
        model,
        cluster,
        workload,
        plans=plans,
        profile=profile,
        transfers=transfers,
        runtime=runtime,
        framework=framework,
    )
    posterior = search.posterior()
    fits = posterior.p_fits >= MAY_FIT
    if not fits.any():
        return None
    worth = posterior.log_mean + np.log(np.maximum(posterior.p_fits, 1e-9))
    row = int(np.argmax(np.where(fits, worth, -np.inf)))
    plan = search.table.plan(row)
    slower, faster = (0.0, 0.0) if measured_network or cluster.nodes == 1 else _network_doubt(search, posterior, row)
    middle = float(posterior.log_mean[row])
    # By how much the transfers were off, on average, beyond what is believed of this plan for it.
    errors = [transfer.log_speed for transfer in transfers if transfer.log_speed is not None]
    believed = middle - float(np.log(search.estimates.tokens_per_s_per_gpu[row]))
    unexplained = abs(float(np.mean(errors)) - believed) if errors else 0.0
    spreads = (posterior.log_sd[row], 0.0 if same_model else OTHER_MODEL_SD, unexplained)
    own = NINETY_PERCENT * float(np.linalg.norm(spreads))
    return Carried(
        plan=plan,
        tokens_per_s_per_gpu=float(np.exp(middle)),
        interval=(float(np.exp(middle - np.hypot(own, slower))), float(np.exp(middle + np.hypot(own, faster)))),
        p_fits=float(posterior.p_fits[row]),
        estimate=search.estimate_of(plan),
        trial_gpu_s=float(posterior.trial_gpu_s[row]),
    )


def _network_doubt(search: Search, posterior: Posterior, row: int) -> tuple[float, float]:
    """By how much (ln) a step is slower or faster if links between nodes are at either end of their 90 %."""
    mean = np.array([posterior.calibration[name][0] for name in PARAMETERS], dtype=np.float64)
    network = np.array([name in NETWORK_TERMS for name in PARAMETERS], dtype=np.float64)
    rows = np.array([row], dtype=np.intp)
    at, slow, fast = (
        float(behaviour(search.estimates, mean + change * network, rows).log_time[0])
        for change in (0.0, np.log(NETWORK_SLOWER), -np.log(NETWORK_FASTER))
    )
    return slow - at, at - fast
