"""Settings: where this installation keeps its database and logs, read from the environment when asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from autotune.errors import InputError

DATABASE_VARIABLE = "AUTOTUNE_DB"
LOG_DIR_VARIABLE = "AUTOTUNE_LOG_DIR"
BROKER_VARIABLE = "AUTOTUNE_BROKER"
SERVER_VARIABLE = "AUTOTUNE_SERVER"
API_KEY_VARIABLE = "AUTOTUNE_API_KEY"
WEBHOOK_VARIABLE = "AUTOTUNE_WEBHOOK_URL"
WEBHOOK_SECRET_VARIABLE = "AUTOTUNE_WEBHOOK_SECRET"
SMTP_VARIABLE = "AUTOTUNE_SMTP_URL"
ALERT_EMAIL_VARIABLE = "AUTOTUNE_ALERT_EMAIL"
ALERT_SENDER_VARIABLE = "AUTOTUNE_ALERT_SENDER"
LEASE_VARIABLE = "AUTOTUNE_LEASE_S"
MAX_LIVE_VARIABLE = "AUTOTUNE_MAX_LIVE"
COMMANDS_VARIABLE = "AUTOTUNE_COMMANDS"
SECRET_VARIABLES = (
    DATABASE_VARIABLE, BROKER_VARIABLE, API_KEY_VARIABLE, WEBHOOK_VARIABLE, WEBHOOK_SECRET_VARIABLE, SMTP_VARIABLE,
)  # fmt: skip
"""Those that hold a password, a key or a token, and can be given as the name of a file by NAME_FILE."""

FILE = "_FILE"
DEFAULT_BROKER = "redis://127.0.0.1:6379/0"
# Below, a busy machine would lose what it measures; above, the lease to begin under would not be the longer one.
MIN_LEASE_S, MAX_LEASE_S = 1.0, 30.0
MAX_LIVE = 8
"""Tunings of one principal in one pool that are under way at a time. One uses all nodes that it can; a few more fill
the gaps while tuners think."""
MOST_LIVE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimes:
    """How soon a fleet notices that something is gone: a node, a tuner, a message.

    Args:
        lease_s: a node that is silent for so long is lost, and its part in a job; twice as long if it was to begin one.
        renew_every_s: how often it says that it works, and hears whether it is to go on.
        claim_s: a tuner that is silent for so long within one step loses the tuning to another one.
        sweep_every_s: how often beat asks for what is due.
        unsent_after_s: a message that a node has not acted upon for so long is sent again.
        quiet_after_s: a worker that has consumed nothing for so long sends itself a canary.
    """

    lease_s: float = 15.0
    renew_every_s: float = 1.0
    claim_s: float = 30.0
    sweep_every_s: float = 5.0
    unsent_after_s: float = 5.0
    quiet_after_s: float = 5.0

    @classmethod
    def of(cls, lease_s: float) -> FleetTimes:
        """All of them, as much longer or shorter than usual as the lease is."""
        usual = cls()
        factor = lease_s / usual.lease_s
        return cls(**{each.name: factor * getattr(usual, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where things are kept, and how the parts of a fleet find each other.

    `database_url` is a SQLAlchemy URL; `log_dir` gets one folder a rank group; `broker_url` is Redis'. `server` is the
    API that the command line asks instead of this machine (empty: none), `api_key` what it shows there. Alerts of the
    nightly regression go to `webhook_url`, signed with `webhook_secret`, and through `smtp_url` to `alert_email`.
    `times` is how soon a fleet notices that something is gone. `max_live` tunings of one principal in one pool are
    under way at a time. `commands_dir` has the programs of the operator's own that may run on this machine, if any.
    """

    database_url: str
    log_dir: Path
    broker_url: str = DEFAULT_BROKER
    server: str = ""
    api_key: str = field(default="", repr=False)
    webhook_url: str = field(default="", repr=False)  # some receivers put a token into it
    webhook_secret: str = field(default="", repr=False)
    smtp_url: str = field(default="", repr=False)
    alert_email: str = ""
    alert_sender: str = ""
    times: FleetTimes = FleetTimes()
    max_live: int = MAX_LIVE
    commands_dir: Path | None = None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `environ` (the process environment if None).

    AUTOTUNE_DB is the database's URL; without it a SQLite file in the user's data folder is used
    (XDG_DATA_HOME, else ~/.local/share). AUTOTUNE_LOG_DIR is the folder of the ranks' logs; without it they
    go to the user's state folder (XDG_STATE_HOME, else ~/.local/state). AUTOTUNE_BROKER is the fleet's Redis,
    AUTOTUNE_SERVER and AUTOTUNE_API_KEY are for the command line as a client. AUTOTUNE_WEBHOOK_URL,
    AUTOTUNE_WEBHOOK_SECRET, AUTOTUNE_SMTP_URL, AUTOTUNE_ALERT_EMAIL and AUTOTUNE_ALERT_SENDER say where incidents are
    told. AUTOTUNE_LEASE_S is the time after which a silent node loses its job, by default 15 s; the fleet's other times
    become longer or shorter with it. All its parts must be given the same. AUTOTUNE_MAX_LIVE is how many tunings of one
    principal in one pool its tuners have under way at a time, by default 8. AUTOTUNE_COMMANDS is the directory of the
    operator's own programs that may run on this machine; without it none may. What can hold a secret (SECRET_VARIABLES)
    may be in a file that NAME_FILE names. Creates nothing.

    Raises:
        InputError: AUTOTUNE_LEASE_S is no time that a lease can have, or AUTOTUNE_MAX_LIVE no such number; or a file of
            a secret cannot be read, is empty, or is given beside the secret itself; or AUTOTUNE_COMMANDS is no
            directory.
    """
    environ = os.environ if environ is None else environ
    environ = {**environ, **{name: _from_file(environ, name) for name in SECRET_VARIABLES if environ.get(name + FILE)}}
    data = _folder(environ, "XDG_DATA_HOME", ".local/share")
    state = _folder(environ, "XDG_STATE_HOME", ".local/state")
    return Settings(
        database_url=environ.get(DATABASE_VARIABLE) or f"sqlite:///{data / 'autotune.db'}",
        log_dir=Path(environ.get(LOG_DIR_VARIABLE) or state / "logs"),
        broker_url=environ.get(BROKER_VARIABLE) or DEFAULT_BROKER,
        server=environ.get(SERVER_VARIABLE) or "",
        api_key=environ.get(API_KEY_VARIABLE) or "",
        webhook_url=environ.get(WEBHOOK_VARIABLE) or "",
        webhook_secret=environ.get(WEBHOOK_SECRET_VARIABLE) or "",
        smtp_url=environ.get(SMTP_VARIABLE) or "",
        alert_email=environ.get(ALERT_EMAIL_VARIABLE) or "",
        alert_sender=environ.get(ALERT_SENDER_VARIABLE) or "",
        times=_times(environ.get(LEASE_VARIABLE)),
        max_live=_max_live(environ.get(MAX_LIVE_VARIABLE)),
        commands_dir=_directory(environ.get(COMMANDS_VARIABLE)),
    )


def database_file(url: str) -> Path | None:
    """The file of a SQLite URL; None for another kind of database."""
    prefix = "sqlite:///"
    return Path(url.removeprefix(prefix)) if url.startswith(prefix) else None


def _from_file(environ: Mapping[str, str], name: str) -> str:
    """A secret from the file that NAME_FILE names, without white space around it. No message repeats the secret."""
    variable, path = name + FILE, environ[name + FILE]
    if environ.get(name):
        raise InputError(variable, path, f"either {name} or {variable}, not both")
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InputError(variable, path, f"a file of text that can be read ({error})") from None
    if not secret:
        raise InputError(variable, path, "a file that is not empty")
    return secret


def _times(lease: str | None) -> FleetTimes:
    if not lease:
        return FleetTimes()
    try:
        lease_s = float(lease)
    except ValueError:
        lease_s = 0.0
    if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
        raise InputError(LEASE_VARIABLE, lease, f"{MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds")
    return FleetTimes.of(lease_s)


def _max_live(given: str | None) -> int:
    if not given:
        return MAX_LIVE
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= MOST_LIVE):
        raise InputError(MAX_LIVE_VARIABLE, given, f"a whole number from 1 to {MOST_LIVE}")
    return int(given)


def _directory(given: str | None) -> Path | None:
    if not given:
        return None
    path = Path(given)
    if not path.is_dir():
        raise InputError(COMMANDS_VARIABLE, given, "a directory")
    return path


def _folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """`autotune` under an XDG base folder; relative values are ignored, as the XDG specification says."""
    base = Path(environ.get(variable) or "")
    return (base if base.is_absolute() else Path.home() / default) / "autotune"
