"""Measurements page by page, each row with where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Label, Select, func, select
from sqlalchemy.orm import InstrumentedAttribute

from autotune.errors import UnknownNameError
from storage.session import SessionStore
from storage.tables import CollectiveRow, FingerprintRow, LayerRow, ProbeRow, StepRow, TrialRow

KINDS: dict[str, type[CollectiveRow] | type[LayerRow] | type[StepRow]] = {
    "collective": CollectiveRow,
    "layer": LayerRow,
    "step": StepRow,
}
ENVIRONMENT = ("hostname", "device_name", "device_count", "driver", "runtime", "collective_library", "torch")


class PageStore(SessionStore):
    """Measurements for people who look through them."""

    def measurements_page(
        self, kind: str, *, cluster_key: str | None = None, after: int = 0, limit: int = 100
    ) -> Sequence[dict[str, Any]]:
        """Rows of `collective`, `layer` or `step` measurements with their provenance, by id: those with ids above.

        A row holds the measurement's columns, the environment of its fingerprint, `tuning_id`, `measured_at` and
        `log_path` of its probe or trial, and a trial's `plan_key`. Raises UnknownNameError for another kind.
        """
        if kind not in KINDS:
            raise UnknownNameError("measurement", kind, KINDS)
        row = KINDS[kind]
        query = _query(row).where(row.id > after).order_by(row.id).limit(limit)
        if cluster_key is not None:
            query = query.where(row.cluster_key == cluster_key)
        with self.reading() as session:
            return [dict(found) for found in session.execute(query).mappings()]


def _query(row: type[CollectiveRow] | type[LayerRow] | type[StepRow]) -> Select[Any]:
    columns: list[InstrumentedAttribute[Any] | Label[Any]]
    columns = [getattr(row, attribute.key) for attribute in row.__mapper__.column_attrs]
    columns += [getattr(FingerprintRow, name) for name in ENVIRONMENT]
    if row is StepRow:
        return (
            select(
                *columns,
                func.coalesce(TrialRow.tuning_id, ProbeRow.tuning_id).label("tuning_id"),
                func.coalesce(TrialRow.finished_at, ProbeRow.finished_at).label("measured_at"),
                ProbeRow.log_path,
                TrialRow.plan_key,
            )
            .join(FingerprintRow, FingerprintRow.key == StepRow.fingerprint_key)
            .outerjoin(TrialRow, TrialRow.id == StepRow.trial_id)
            .outerjoin(ProbeRow, ProbeRow.id == StepRow.probe_run_id)
        )
    return (
        select(*columns, ProbeRow.tuning_id, ProbeRow.finished_at.label("measured_at"), ProbeRow.log_path)
        .join(FingerprintRow, FingerprintRow.key == row.fingerprint_key)
        .join(ProbeRow, ProbeRow.id == row.probe_run_id)
    )
