"""What `make box` shows."""

from __future__ import annotations


def demonstrate(*, nodes: int, ranks: int, rate_mbit: float, keep: bool) -> None:
    """Brings a box up, tunes in it and prints what its slow link costs."""
    raise NotImplementedError
