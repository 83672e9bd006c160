"""What trials say of a cluster: corrections of the physical parameters behind the estimates, with their uncertainty.

A parameter is ln(true / assumed) of one thing that can be faster or slower than assumed (TERMS); it multiplies one term
of the step time. Priors are normal around zero with the spread that the assumptions showed between published sources
(docs/calibration.md). What no trial exercises keeps its prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.estimate import EstimateTable
from autotune.cost.framework import Framework
from autotune.cost.pieces import joined
from autotune.cost.table import Floats
from autotune.specs import ClusterSpec, Profile

NOTHING: Floats = np.zeros(0)

ZERO_STAGES = ("zero_0", "zero_1", "zero_2", "zero_3")
"""A factor of the whole step for each ZeRO stage: each is code of its own, which may be slow alone."""

PRIOR_SD = {
    "all": 0.01,
    "compute": 0.01,
    "exchange": 0.08,
    "host": 0.04,
    "messages": 0.12,
    "gradients": 0.2,
    "optimizer": 0.12,
    **dict.fromkeys(ZERO_STAGES, 0.02),
}
"""Standard deviation of each parameter before anything was measured, for a framework whose constants were checked."""

UNCHECKED_SD = {
    "all": 0.3,
    "compute": 0.15,
    "exchange": 0.5,
    "host": 0.6,
    "messages": 0.7,
    "gradients": 0.6,
    "optimizer": 0.7,
    **dict.fromkeys(ZERO_STAGES, 0.15),
}
"""The same for one that nobody checked: sources that nothing was fitted on are off by exp(0.3) as a whole."""

PARAMETERS = tuple(PRIOR_SD)


@dataclass(frozen=True, eq=False, slots=True)
class Behaviour:
    """Log step time and its slopes at n plans.

    Args:
        log_time: [n] ln seconds.
        slopes: [n, parameters] derivative by each parameter.
    """

    log_time: Floats
    slopes: Floats


UNREAD_SD = {"messages": 1.5, "gradients": 1.5}
"""What comes on top of that where the link between nodes was never read: networks differ from what is on paper by about
the factor that latencies do (cost.calibrate.LATENCY_SD)."""


CONTRADICTED = 0.25
"""Half of all trials and transfers off by more than this (ln), at least CONTRADICTIONS of them: what was checked
elsewhere does not hold here. Checked frameworks are off by 0.1 on average."""

CONTRADICTIONS = 3


def prior_covariance(estimates: EstimateTable, errors: Floats = NOTHING) -> Floats:
    """Of the parameters, [parameters, parameters].

    Wider for a framework whose constants nobody checked or the errors contradict, and then for a network that was never
    read: the checks include the networks on which they were made.

    Args:
        estimates: whose framework and network.
        errors: ln(measured / estimated) of all trials and transfers.
    """
    contradicted = len(errors) >= CONTRADICTIONS and float(np.median(np.abs(errors))) > CONTRADICTED
    if estimates.framework.checked and not contradicted:
        return np.diag([PRIOR_SD[name] ** 2 for name in PARAMETERS])
    network = UNREAD_SD if estimates.network_unread else {}
    return np.diag([UNCHECKED_SD[name] ** 2 + network.get(name, 0.0) ** 2 for name in PARAMETERS])


@dataclass(frozen=True, eq=False, slots=True)
class Assumed:
    """Estimates under one assumption about framework and network, and how probable it is, over the others.

    Args:
        estimates: of a table.
        probability: before anything was measured.
        slower: the network takes so many times as long as was read, and the estimates have it so.
    """

    estimates: EstimateTable
    probability: float = 1.0
    slower: float = 1.0

    @property
    def shift(self) -> Floats:
        """[parameters] What the estimates already have of each parameter, over those of the network as it was read."""
        return float(np.log(self.slower)) * np.array([name in UNREAD_SD for name in PARAMETERS], dtype=np.float64)


@dataclass(frozen=True, eq=False, slots=True)
class Supposed:
    """How probable a spread of the parameters is, and their covariance then."""

    probability: float
    covariance: Floats


OTHER_NETWORK, OTHER_EVERYTHING = 0.1, 0.05
"""How probably the network is several times as slow or as fast as it was read, and how probably nothing is as it was
checked (assumed): a reading may be old, and a cluster may be shared."""

NETWORK_FACTOR, NETWORK_SD = 4.0, 0.4
"""Such a factor, and how far (ln) the network is from it then."""


def network_factors(framework: Framework) -> dict[float, float]:
    """How many times as slow as it is taken to be the network may be, each with its probability.

    A slow network is more than a wide spread around a fast one: it changes which plans are good. The spread of a
    framework that nobody checked covers such networks already.
    """
    if not framework.checked:
        return {1.0: 1.0}
    return {1.0: 1.0 - 2.0 * OTHER_NETWORK, NETWORK_FACTOR: OTHER_NETWORK, 1.0 / NETWORK_FACTOR: OTHER_NETWORK}


def with_network(cluster: ClusterSpec, profile: Profile | None, slower: float) -> tuple[ClusterSpec, Profile | None]:
    """The same with its slowest link so many times as slow: that between nodes, or inside the only one."""
    if slower == 1.0:
        return cluster, profile
    level, crosses = ("intra", False) if cluster.inter is None else ("inter", True)
    link = getattr(cluster, level)
    changed = {
        "bytes_per_s": link.bytes_per_s and link.bytes_per_s / slower,
        "latency_s": link.latency_s and link.latency_s * slower,
    }
    cluster = cluster.model_copy(update={level: link.model_copy(update=changed)})
    if profile is None:
        return cluster, None
    links = tuple(
        fit.model_copy(update={"latency_s": fit.latency_s * slower, "bytes_per_s": fit.bytes_per_s / slower})
        if fit.crosses_nodes == crosses
        else fit
        for fit in profile.links
    )
    return cluster, profile.model_copy(update={"links": links})


def priors(assumed: Assumed, errors: Floats = NOTHING) -> list[Supposed]:
    """What the parameters may be, the likeliest first; each counts by how probable it makes what was measured.

    What was checked is a strong claim, so that there is a small doubt in all of it.
    """
    usual = prior_covariance(assumed.estimates, errors)
    wide = np.diag([UNCHECKED_SD[name] ** 2 for name in PARAMETERS])
    if assumed.slower != 1.0:
        return [Supposed(1.0, usual + np.diag(NETWORK_SD**2 * (assumed.shift != 0.0)))]
    if usual[0, 0] >= wide[0, 0]:
        return [Supposed(1.0, usual)]
    return [Supposed(1.0 - OTHER_EVERYTHING, usual), Supposed(OTHER_EVERYTHING, wide)]


def behaviour(estimates: EstimateTable, parameters: Floats, rows: NDArray[np.intp] | None = None) -> Behaviour:
    """The step time under corrected parameters.

    step = all * zero * (joined(compute + exchange, host) + messages + gradients - hidden + optimizer), where zero is
    the factor of the plan's ZeRO stage and hidden the least of what may be hidden and the computation beside it
    (cost.time.Terms).

    Args:
        estimates: of a table.
        parameters: [parameters], zeros for the estimates themselves.
        rows: of the table; all of them by default.
    """
    where = slice(None) if rows is None else rows
    whole, compute_f, exchange_f, host_f, messages_f, gradients_f, optimizer_f, *stages = np.exp(parameters)
    terms, zero = estimates.terms, estimates.zero_stage[where]
    compute, exchange = terms.compute[where] * compute_f, terms.exchange[where] * exchange_f
    device, host = compute + exchange, terms.host[where] * host_f
    paced = joined(device, host, queued=estimates.queued)
    by_device = (device / paced) ** 3 if estimates.queued else 1.0
    by_host = (host / paced) ** 3 if estimates.queued else 1.0
    messages = terms.messages[where] * messages_f
    hideable, beside = terms.hideable[where] * gradients_f, terms.beside[where] * compute_f
    gradients, limited = terms.gradients[where] * gradients_f, beside < hideable
    optimizer = terms.optimizer[where] * optimizer_f
    step = paced + messages + gradients - np.minimum(hideable, beside) + optimizer
    parts = [
        step,
        by_device * compute - np.where(limited, beside, 0.0),
        by_device * exchange,
        by_host * host,
        messages,
        gradients - np.where(limited, 0.0, hideable),
        optimizer,
    ]
    own = [(zero == stage).astype(np.float64) for stage in range(len(stages))]
    return Behaviour(np.log(whole * np.array(stages)[zero] * step), np.concatenate([np.stack(parts) / step, own]).T)
