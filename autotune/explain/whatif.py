"""What if: which single change of cluster, batch, software or model would help the best plan most. All estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autotune.cost.estimate import EstimateTable, estimate_table
from autotune.cost.framework import Framework, framework_for
from autotune.cost.table import PlanTable
from autotune.search.space import Runtime, legal_plans
from autotune.specs import ClusterSpec, Link, ModelSpec, Plan, Profile, Space, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that an estimate depends on beside the plan."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile | None = None
    framework: Framework | None = None
    space: Space = Space()
    runtime: Runtime = Runtime.ANY

    def plans(self) -> PlanTable:
        """The legal plans."""
        return legal_plans(self.model, self.cluster, self.workload, self.space, self.runtime)

    def estimates(self, table: PlanTable) -> EstimateTable:
        """Estimates of plans."""
        return estimate_table(self.model, self.cluster, self.workload, table, self.profile, self.framework)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change, the relative gain in tokens/s/GPU of the best plan under it, and that plan. Estimates."""

    change: str
    gain: float
    plan: Plan

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.change}: {self.gain:+.0%} tokens/s/GPU, with {self.plan.key} (estimate)"

    def to_data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "change": self.change,
            "gain": self.gain,
            "plan": self.plan.to_data(),
            "source": "estimate",
            "text": self.text,
        }


def what_ifs(setting: Setting, table: PlanTable, estimates: EstimateTable) -> list[WhatIf]:
    """The gain of each single change, largest first; none where no plan fits to compare with.

    Args:
        setting: as it is.
        table: its legal plans.
        estimates: of the table.
    """
    if estimates.best_row is None:
        return []
    before = float(estimates.tokens_per_s_per_gpu[estimates.best_row])
    # Doubling one thing makes no plan more than twice as fast: plans slower than half of the best cannot win.
    hopeful = table.take(estimates.tokens_per_s_per_gpu >= 0.5 * before)
    found = []
    for change, changed, same_plans in _changes(setting):
        plans = hopeful if same_plans else changed.plans()
        after = changed.estimates(plans)
        if (best := after.best_row) is not None:
            gain = float(after.tokens_per_s_per_gpu[best]) / before - 1.0
            found.append(WhatIf(change=change, gain=gain, plan=plans.plan(best)))
    return sorted(found, key=lambda item: -item.gain)


def _changes(setting: Setting) -> Iterator[tuple[str, Setting, bool]]:
    """(change in words, the changed setting, whether the legal plans stay the same).

    Speeds change in the catalog's figures and in the profile's alike.
    """
    cluster, profile, model, workload = setting.cluster, setting.profile, setting.model, setting.workload
    device = cluster.device
    if cluster.gpus_per_node > 1:
        yield "twice the bandwidth inside a node", _faster_links(setting, inter=False), True
    if cluster.nodes > 1:
        yield "twice the bandwidth between nodes", _faster_links(setting, inter=True), True
    more = device.model_copy(update={"memory_bytes": 2 * device.memory_bytes})
    yield "twice the memory a device", replace(setting, cluster=cluster.model_copy(update={"device": more})), True
    faster_fit, cheaper_fit = profile, profile
    if profile is not None and profile.compute is not None:
        fit = profile.compute
        twice = fit.model_copy(update={"flops_per_s": 2.0 * fit.flops_per_s})
        half = fit.model_copy(update={"launch_s": 0.5 * fit.launch_s})
        faster_fit, cheaper_fit = (profile.model_copy(update={"compute": each}) for each in (twice, half))
    peaks = {dtype: 2.0 * peak for dtype, peak in device.peak_flops_per_s.items()}
    faster = cluster.model_copy(update={"device": device.model_copy(update={"peak_flops_per_s": peaks})})
    yield "twice the matrix FLOP/s a device", replace(setting, cluster=faster, profile=faster_fit), True
    own = framework_for(setting.workload, setting.framework)
    cheaper = replace(own, kernel_s=0.5 * own.kernel_s)
    change = "half the cost of launching a kernel (compiled or captured kernels)"
    yield change, replace(setting, profile=cheaper_fit, framework=cheaper), True
    larger = workload.model_copy(update={"global_batch": 2 * workload.global_batch})
    yield "twice the global batch", replace(setting, workload=larger), False
    if model.layers % 4 == 0 and not model.experts and model.latent_attention is None:
        # 12 L h² parameters stay the same with L / 4 and 2 h; heads keep their size.
        doubled = {name: 2 * getattr(model, name) for name in ("hidden", "heads", "kv_heads", "ffn")}
        wider = model.model_copy(update={"layers": model.layers // 4, **doubled})
        change = "a model of about the same size with a quarter of the layers, twice as wide"
        yield change, replace(setting, model=wider), False


def _faster_links(setting: Setting, *, inter: bool) -> Setting:
    """Links of one level at twice their rate."""
    cluster, profile = setting.cluster, setting.profile
    name = "inter" if inter else "intra"
    link: Link = getattr(cluster, name)
    rate = 2.0 * link.bytes_per_s if link.bytes_per_s else None
    changed = cluster.model_copy(update={name: link.model_copy(update={"bytes_per_s": rate})})
    if profile is not None:
        links = tuple(
            fit.model_copy(update={"bytes_per_s": 2.0 * fit.bytes_per_s}) if fit.crosses_nodes is inter else fit
            for fit in profile.links
        )
        profile = profile.model_copy(update={"links": links})
    return replace(setting, cluster=changed, profile=profile)
