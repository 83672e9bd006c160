"""The box from the command line: `python -m deploy.box run | list | down` (what `make box` calls)."""

from __future__ import annotations

import argparse
import sys

from deploy.box.network import numbers
from deploy.box.processes import BoxError, require_root
from deploy.box.removal import remove, watch


def main() -> int:
    """Runs one command and returns the exit status."""
    options = _parser().parse_args()
    try:
        require_root()
        _COMMANDS[options.command](options)
    except BoxError as error:
        print(f"box: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.box", description="A cluster in a box on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="bring a box up, tune in it, show that its slow link matters, remove it")
    run.add_argument("--nodes", type=int, default=2)
    run.add_argument("--ranks", type=int, default=4, help="CPU ranks a node")
    run.add_argument("--rate-mbit", type=float, default=200.0, help="speed of a node's link, each direction")
    run.add_argument("--keep", action="store_true", help="leave it up, and say how to use and remove it")
    commands.add_parser("list", help="the boxes that are up")
    down = commands.add_parser("down", help="remove boxes, also those that a crash left behind")
    down.add_argument("number", type=int, nargs="*", help="all boxes if none is named")
    commands.add_parser("watch").add_argument("number", type=int)
    return parser


def _run(options: argparse.Namespace) -> None:
    from deploy.box.demonstration import demonstrate

    demonstrate(nodes=options.nodes, ranks=options.ranks, rate_mbit=options.rate_mbit, keep=options.keep)


def _list(_options: argparse.Namespace) -> None:
    for number in numbers():
        print(number)


def _down(options: argparse.Namespace) -> None:
    for number in options.number or numbers():
        remove(number)


def _watch(options: argparse.Namespace) -> None:
    watch(options.number)


_COMMANDS = {"run": _run, "list": _list, "down": _down, "watch": _watch}

if __name__ == "__main__":
    sys.exit(main())
