"""Who is asked: a server (--server, $AUTOTUNE_SERVER), or this machine's database. Both answer with the same objects.

What the API answers and what `Here` answers is built by the same functions (autotune.tuning.report, knowledge.answer),
so that a command has one way to print it, and scripts need not know who was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from autotune.cli import output
from autotune.cli.database import is_there, open_to_read, open_to_write, stored_clusters, stored_models, stored_profile
from autotune.cli.inputs import Inputs, read_inputs
from autotune.errors import InputError
from autotune.settings import read_settings

if TYPE_CHECKING:
    from autotune.client import Client
    from autotune.specs import ClusterSpec, ModelSpec

Data = dict[str, Any]

ASKABLE = frozenset({"tune", "show", "history", "best", "known", "plan", "cancel", "nodes", "models", "cluster"})

LOCAL_RECORDS = frozenset({"export", "regress", "import", "imports", "db", "estimate", "check"})
"""Commands that answer from records, so that somebody who works with a server may take this machine's for its."""

_server: ContextVar[str] = ContextVar("server", default="")
_named: ContextVar[bool] = ContextVar("named", default=False)


def use_server(url: str | None, command: str) -> None:
    """Notes the server of this command line; None takes the settings', where the command can be asked of one.

    Raises:
        InputError: a server is named, and the command works on this machine only.
    """
    if url is not None and command not in ASKABLE:
        raise InputError("--server", url, f"`autotune {command}` works on this machine only: leave it out")
    default = read_settings().server
    if url is None and default and command in LOCAL_RECORDS:
        output.error_console().print(
            f"`autotune {command}` asks this machine's database, not $AUTOTUNE_SERVER", soft_wrap=True
        )
    _named.set(url is not None)
    _server.set((default if command in ASKABLE else "") if url is None else url)


def asked_server(db: str | None = None) -> str | None:
    """The server to ask; None for this machine, and where --db names a database while only the settings have a server.

    Raises:
        InputError: both --server and --db are given.
    """
    if db is not None and _server.get():
        if _named.get():
            raise InputError("--db", db, "it goes with this machine only, not with --server")
        return None
    return _server.get() or None


def connect() -> closing[Client]:
    """The client of the named server. Raises ServerError and InputError."""
    from autotune.client import Client

    url = asked_server()
    if url is None:
        raise InputError("--server", None, "this command asks a server: name it, or set $AUTOTUNE_SERVER")
    return closing(Client(url, read_settings().api_key))


def ask(db: str | None) -> closing[Client] | nullcontext[Here]:
    """The server where one is named, else this machine's database."""
    return nullcontext(Here(db)) if asked_server(db) is None else connect()


class Here:
    """This machine, asked as a server is (autotune.client.Client), and answering the same from the database of --db.

    Files, too, name models and clusters here.
    """

    def __init__(self, db: str | None) -> None:
        self._db = db

    def tuning(self, tuning_id: str) -> Data:
        """One tuning: its request, state, trials, best plan and explanation."""
        from autotune.tuning.report import tuning_answer

        with open_to_read(self._db) as store:
            tuning = store.tuning(tuning_id)
            return tuning_answer(store, tuning, store.queue_places([tuning.id]).get(tuning.id))

    def tunings(self, *, limit: int) -> Sequence[Data]:
        """The newest tunings, newest first."""
        from autotune.tuning.report import tuning_row

        with open_to_read(self._db) as store:
            found = store.tunings(limit)
            places = store.queue_places([tuning.id for tuning in found])
            return [tuning_row(tuning, store.trials(tuning.id), places.get(tuning.id)) for tuning in found]

    def cancel(self, tuning_id: str, *, force: bool) -> Data:
        """Takes back a request. Nobody else can want what runs here, so that `force` changes nothing."""
        from autotune.fleet.local import cancel_here
        from autotune.tuning.report import submitted_answer

        with open_to_write(self._db) as store:
            found = store.tuning(tuning_id)
            if found.pool:
                raise InputError("tuning", found.id, "it is a fleet's: name its server with --server")
            return submitted_answer(cancel_here(store, found.id), created=False)

    def best(self, **query: str | int | None) -> Data:
        """What is known for a question; without one the best plan of a tuning, by default the newest that has any."""
        target = _text(query["for"])
        if query["tuning"] is None and any(query[name] is not None for name in QUESTION if name != "target"):
            return self._known(self.inputs({**query, "target": target}), target)
        from autotune.tuning.report import best_answer, newest_measured

        with open_to_read(self._db) as store:
            tuning = newest_measured(store) if query["tuning"] is None else store.tuning(str(query["tuning"]))
            if tuning is None:
                live = next((item for item in store.tunings(1) if not item.state.ended), None)
                then = f"{live.id} is {live.state}, see autotune show" if live else "run autotune tune"
                raise InputError("--tuning", None, f"no tuning in the database has a complete trial yet: {then}")
            return best_answer(store, tuning, target)

    def _known(self, inputs: Inputs, target: str | None) -> Data:
        from autotune.search.space import Runtime, require_bounded
        from autotune.tuning.report import known_answer

        question = inputs.model, inputs.cluster, inputs.workload
        require_bounded(*question, Runtime.TORCH)
        with open_to_read(self._db) if is_there(self._db) else open_to_write(self._db) as store:
            return known_answer(store, *question, target)

    def known(self, *, limit: int, **query: Any) -> Sequence[Data]:
        """Best-known entries, newest first."""
        from autotune.knowledge.answer import entry_data

        with open_to_read(self._db) as store:
            return [entry_data(entry) for entry in store.best_page(limit=limit, **query)]

    def plans(self, **query: Any) -> Data:
        """The ranking of the legal plans by estimate; of a dimension a list of values, or None for all."""
        from autotune.search.offline import rank
        from autotune.search.space import require_bounded
        from autotune.specs import Space
        from autotune.tuning.report import ranking_data
        from autotune.tuning.targets import export_refusal

        space = Space.from_data({name: query[name] for name in Space.model_fields if query[name] is not None}, "space")
        inputs = self.inputs({**query, "target": query["for"]})
        question = inputs.model, inputs.cluster, inputs.workload
        require_bounded(*question)
        profile = stored_profile(inputs.cluster, self._db)
        ranking = rank(
            *question, space, profile=profile, limit=query["top"], distinct=not query["all"],
            refusal=export_refusal(*question),
        )  # fmt: skip
        return ranking_data(*question, ranking, profile)

    def inputs(self, query: Data) -> Inputs:
        """The model, cluster and workload of a question."""
        return read_inputs(**{name: query[name] for name in QUESTION}, db=self._db)

    def models(self) -> Sequence[Data]:
        """Presets and stored models, by name."""
        from autotune.catalog import model_entries

        return model_entries(stored_models(self._db))

    def put_model(self, model: ModelSpec) -> Data:
        """Stores a model."""

        with open_to_write(self._db) as store:
            store.put_model(model)
        return model.to_data()

    def clusters(self) -> Sequence[Data]:
        """Stored clusters, by name."""

        return [cluster.to_data() for cluster in stored_clusters(self._db)]

    def put_cluster(self, cluster: ClusterSpec) -> Data:
        """Stores a cluster. Raises StoreConflictError for the name of a pool of other hardware."""
        from autotune.fleet.service import require_no_pool

        with open_to_write(self._db) as store:
            require_no_pool(store, cluster)
            store.put_cluster(cluster)
        return cluster.to_data()


QUESTION = ("model", "cluster", "seq_len", "global_batch", "dtype", "framework", "kernels", "precision", "target")
"""What a question for plans names."""


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)
