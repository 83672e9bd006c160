"""The plan space, its ranking by estimate, and the search over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.search.core import Measurement, Search

__all__ = ["Measurement", "Search"]


def __getattr__(name: str) -> object:
    """The core's classes, loaded when they are asked for: a command that only ranks plans does not wait for them."""
    if name == "Search":
        from autotune.search.core import Search

        return Search
    if name == "Measurement":
        from autotune.search.core import Measurement

        return Measurement
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
