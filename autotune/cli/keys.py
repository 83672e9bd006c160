"""`autotune keys`: the API's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import options, output

if TYPE_CHECKING:
    from autotune.specs import ApiKey

app = typer.Typer(help="API keys: make, list and revoke them.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: the principal of his requests.")],
    role: Annotated[
        str, typer.Option("--role", metavar="read|submit|admin", help="What he may do; each includes those before it.")
    ] = "submit",
    expires_days: Annotated[
        int | None, typer.Option("--expires-days", metavar="DAYS", help="Valid so long. Default: until it is revoked.")
    ] = None,
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a key. Its secret is printed once: the database keeps only a hash."""
    from autotune.cli.database import open_to_write
    from autotune.fleet.keys import create_key

    with open_to_write(db) as store:
        made = create_key(store, name, role, expires_days)
    if as_json:
        output.print_json({"key": made.key.to_data(), "secret": made.secret})
        return
    console = output.console()
    console.print(f"Key {made.key.id} of {made.key.name}, {made.key.role.value}, {_until(made.key)}. Shown only now:")
    console.print(made.secret, soft_wrap=True)


@app.command("list")
def list_keys(db: options.Database = None, as_json: options.AsJson = False) -> None:
    """List all keys, without their secrets, which nobody has."""
    from autotune.cli.database import open_to_read

    with open_to_read(db) as store:
        found = store.keys()
    if as_json:
        output.print_json({"keys": [key.to_data() for key in found]})
        return
    table = output.table("", "<key", "<name", "<role", "<created (UTC)", "<valid")
    for key in found:
        table.add_row(key.id, key.name, key.role.value, f"{key.created_at:%Y-%m-%d %H:%M}", _until(key))
    output.console().print(table if found else "There is no API key yet: autotune keys create NAME")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key's id, as `autotune keys list` shows it.")],
    db: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Revoke a key for good. Running servers take it for two more seconds at most."""
    from autotune.cli.database import open_to_write

    with open_to_write(db) as store:
        revoked = store.revoke_key(key)
    if as_json:
        output.print_json(revoked.to_data())
    else:
        output.console().print(f"Key {revoked.id} of {revoked.name} is revoked")


def _until(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d %H:%M} UTC"
    return "until it is revoked" if key.expires_at is None else f"until {key.expires_at:%Y-%m-%d %H:%M} UTC"
