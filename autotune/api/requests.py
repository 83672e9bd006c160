"""What a client sends: bodies, names of models and clusters, places in a list; and the pages that answer those.

A name is never a path: nothing here opens a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.exceptions import HTTPException

from autotune.api.answers import Json
from autotune.catalog import models as presets
from autotune.catalog import preset
from autotune.catalog.gpus import cluster_from_shorthand, is_shorthand
from autotune.catalog.workloads import workload
from autotune.errors import InputError, UnknownNameError
from autotune.fleet.keys import MAX_DAYS
from autotune.frameworks import targets
from autotune.ports.fleet import FleetStore
from autotune.shown import HIDDEN, PLAIN
from autotune.specs import (
    Budget,
    ClusterSpec,
    DType,
    FrameworkName,
    ModelSpec,
    Role,
    SamplerName,
    Space,
    Spec,
    Workload,
)
from autotune.specs.base import Name, mismatch
from autotune.specs.model import Count
from autotune.specs.workload import KERNELS, PRECISION, Software, read_kernels, read_precision
from autotune.tuning.targets import with_target

DEFAULT_MAX_TRIALS = 24
MAX_CHOICES = 1000
MAX_VALUES = 20_000
"""Of a body: more than a space with all its choices has, and few enough to be judged while others wait."""

_SEEN = rf"^[^{HIDDEN}]*[^\s{HIDDEN}][^{HIDDEN}]*$"
"""Text that is not only spaces."""

Text = Annotated[str | None, Query(min_length=1, max_length=200, pattern=PLAIN)]
"""For a parameter that may be absent."""

ModelName = Annotated[
    str,
    Query(min_length=1, max_length=200, pattern=PLAIN, description="A preset or stored model.", examples=["llama3-8b"]),
]
ClusterName = Annotated[
    str,
    Query(
        min_length=1,
        max_length=200,
        pattern=PLAIN,
        description="A stored cluster, or GPU:NODESxGPUS_PER_NODE.",
        examples=["a100-80gb-sxm:2x8"],
    ),
]
Nodes = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="So many nodes of the cluster. Default: all.")]
SeqLen = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Tokens of a sequence.")]
GlobalBatch = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Sequences a step.")]
DTypeName = Annotated[DType | None, Query(description="Compute dtype.")]
Framework = Annotated[FrameworkName | None, Query(description="What trains. Default: torch, any plan.")]
Precision = Annotated[
    str | None,
    Query(
        max_length=200,
        description=f"KEY=VALUE,...: {', '.join(PRECISION)}. Default: as the framework has them.",
        examples=["grad_dtype=bf16,exp_avg_dtype=fp8"],
    ),
]
Kernels = Annotated[
    str | None,
    Query(
        max_length=200,
        description=f"KEY=VALUE,...: {', '.join(KERNELS)}. Default: as the framework has them.",
        examples=["attention=flash3,tp_overlap=true"],
    ),
]
Target = Annotated[
    str | None,
    Query(
        alias="for",
        pattern=rf"^({'|'.join(targets())})(@[0-9.]+)?$",
        description="Only plans that this framework runs: NAME or NAME@VERSION. `best` gives the launch too.",
    ),
]
PathName = Annotated[str, Path(min_length=1, max_length=200, pattern=PLAIN, description="A name.")]
PathId = Annotated[str, Path(min_length=4, max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="An id.")]


class WorkloadRequest(Software):
    """A workload; what is absent gets the default for the model and the cluster."""

    seq_len: Count | None = None
    global_batch: Count | None = None
    dtype: DType | None = None


def asked_workload(
    seq_len: int | None,
    global_batch: int | None,
    dtype: DType | None,
    framework: FrameworkName | None,
    kernels: str | None,
    precision: str | None = None,
    target: str | None = None,
) -> WorkloadRequest:
    """The workload that query parameters name. Raises InputError."""
    given = {
        "seq_len": seq_len,
        "global_batch": global_batch,
        "dtype": dtype and dtype.value,
        "framework": (framework or FrameworkName.TORCH).value,
        "target": target,
    }
    said = read_kernels(kernels or "") | read_precision(precision or "")
    return WorkloadRequest.from_data(with_target(given) | said, "workload")


class JsonRequest(Request):
    """A request whose JSON is read in little time, and means the same to every reader."""

    async def json(self) -> Any:
        """The body. Raises HTTPException 413 for too many values, 400 for a key that comes twice, and ValueError."""
        body = await self.body()
        if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise HTTPException(413, f"a body of at most {MAX_VALUES} values is taken")
        return json.loads(body, object_pairs_hook=_unambiguous)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise HTTPException(400, f"the body has the key {twice[:200]!r} twice")
    return found


S = TypeVar("S", bound=Spec)


def _whole(spec: type[S], what: str) -> BeforeValidator:
    """Reads an object as this spec, so that errors name what is wrong in it; each member of a union would complain."""
    return BeforeValidator(lambda data: spec.from_data(data, what) if isinstance(data, dict) else data)


class TuningRequest(Spec):
    """What is to be tuned.

    `model` and `cluster` are names, or whole specs. `cluster` names a pool of nodes, `nodes` how many of them the
    training would use (default: all of the cluster). Without a budget 24 trials are run at most. `command` names a
    program that the cluster's nodes offer, which then runs the trials.
    """

    model: Annotated[Name | ModelSpec, _whole(ModelSpec, "body: model")]
    cluster: Annotated[Name | ClusterSpec, _whole(ClusterSpec, "body: cluster")]
    nodes: Count | None = None
    workload: WorkloadRequest = WorkloadRequest()
    space: Space = Space()
    budget: Budget = Budget(max_trials=DEFAULT_MAX_TRIALS)
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0  # what every reader of JSON has exactly (RFC 8259, section 6)
    cold: bool = False
    sampler: SamplerName = SamplerName.PLAN
    command: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in Space.model_fields:
            if len(getattr(self.space, name) or ()) > MAX_CHOICES:
                raise mismatch(f"space.{name}", None, f"at most {MAX_CHOICES} values")
        return self


class QuarantineRequest(Spec):
    """Why a node may not get jobs."""

    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=PLAIN)]


class KeyRequest(Spec):
    """A key to make: for whom, what it may do, and for how long."""

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=_SEEN)]
    role: Role
    expires_days: Annotated[int, Field(ge=1, le=MAX_DAYS)] | None = None


def _through_json(spec: type[S]) -> Callable[[Any], S]:
    """Specs are strict, and only from JSON do they take enums and tuples; the body that we get is parsed already."""

    def validate(data: Any) -> S:
        if isinstance(data, bytes):
            raise HTTPException(415, "send JSON with Content-Type: application/json", {"Accept": "application/json"})
        try:
            return spec.from_data(_as_integers(data), "body")
        except RecursionError:
            raise InputError("body", "a deep document", "fewer levels") from None

    return validate


def _as_integers(data: Any) -> Any:
    """Numbers like 8.0 as the integers that they are in JSON; where a field takes fractions, it takes those too."""
    if isinstance(data, dict):
        return {key: _as_integers(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_as_integers(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


TuningBody = Annotated[TuningRequest, BeforeValidator(_through_json(TuningRequest))]
ModelBody = Annotated[ModelSpec, BeforeValidator(_through_json(ModelSpec))]
ClusterBody = Annotated[ClusterSpec, BeforeValidator(_through_json(ClusterSpec))]
QuarantineBody = Annotated[QuarantineRequest, BeforeValidator(_through_json(QuarantineRequest))]
KeyBody = Annotated[KeyRequest, BeforeValidator(_through_json(KeyRequest))]


def find_model(store: FleetStore, ref: str | ModelSpec) -> ModelSpec:
    """The model that is meant: given whole, a preset, or a stored one. Raises UnknownNameError."""
    return given_model(ref) or _stored(store.model, str(ref), "model", [model.name for model in presets()])


def given_model(ref: str | ModelSpec) -> ModelSpec | None:
    """The model that is meant where nobody has to be asked: given whole, or a preset.

    Raises InputError for another model under a preset's name: its tunings would look like those of the preset.
    """
    if isinstance(ref, str):
        return preset(ref)
    known = preset(ref.name)
    if known is not None and known.key != ref.key:
        raise InputError("body: model.name", ref.name, "another name: a preset has this one, and is another model")
    return ref


def find_cluster(store: FleetStore, ref: str | ClusterSpec, nodes: int | None = None) -> ClusterSpec:
    """The cluster that is meant: given whole, stored, or in the shorthand; of `nodes` nodes, if they are given.

    Raises:
        UnknownNameError: nobody knows it.
        InputError: several nodes of a cluster without a link between them.
    """
    cluster = ref if isinstance(ref, ClusterSpec) else _named_cluster(store, ref)
    if nodes is None or nodes == cluster.nodes:
        return cluster
    if nodes > 1 and cluster.inter is None:
        raise InputError("nodes", nodes, f"1; cluster {cluster.name!r} says nothing of a link between nodes (inter)")
    return ClusterSpec.from_data(cluster.to_data() | {"nodes": nodes}, "cluster")


def find_workload(model: ModelSpec, cluster: ClusterSpec, given: WorkloadRequest) -> Workload:
    """The workload that is meant. Raises InputError."""
    return workload(model, cluster, with_target(given.to_data()))


def _named_cluster(store: FleetStore, name: str) -> ClusterSpec:
    try:
        return store.cluster(name)
    except UnknownNameError:
        if is_shorthand(name):
            return cluster_from_shorthand(name)
        raise


def _stored(find: Callable[[str], ModelSpec], name: str, what: str, also: list[str]) -> ModelSpec:
    """A stored record; where there is none, the error names the presets too."""
    try:
        return find(name)
    except UnknownNameError as error:
        stored = error.allowed.removeprefix("known: ").removesuffix("none yet")
        raise UnknownNameError(what, name, [*also, *filter(None, stored.split(", "))]) from None


T = TypeVar("T")
DEFAULT_LIMIT, MAX_LIMIT = 50, 200
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Items of a page at most.")]
After = Annotated[Text, Query(description="The page after this item: take it from `next` of the page before.")]
AfterNumber = Annotated[int | None, Query(ge=0, le=2**53, description="The page after the item with this number.")]


def after_name(items: Sequence[T], name: Callable[[T], str], after: str | None, limit: int) -> list[T]:
    """Up to `limit` + 1 items whose name comes after the cursor, by name: one more than a page tells of the next."""
    ordered = sorted(items, key=name)
    return [item for item in ordered if after is None or name(item) > after][: limit + 1]


def page(
    request: Request,
    field: str,
    found: Sequence[T],
    limit: int,
    *,
    cursor: Callable[[T], object],
    data: Callable[[T], object],
) -> Json:
    """The answer with `found` cut to `limit`, a path to the `next` page or null, and a Link header (RFC 8288).

    Args:
        request: whose query the next one repeats.
        field: what the items are called.
        found: one item more than the page, where there is a next page.
        limit: items of the page.
        cursor: gives an item's place in the list.
        data: gives an item as plain data.
    """
    shown = list(found[:limit])
    following = None
    if len(found) > limit:
        query = [(key, value) for key, value in request.query_params.multi_items() if key != "after"]
        following = f"{request.url.path}?{urlencode([*query, ('after', str(cursor(shown[-1])))])}"
    headers = {"Link": f'<{following}>; rel="next"'} if following else {}
    return Json({field: [data(item) for item in shown], "next": following}, headers=headers)
