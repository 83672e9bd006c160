"""A command of ours that was run by a test; the fixture `autotune` (conftest.py) runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command that has ended: its exit status and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        return json.loads(self.out)


Command = Callable[..., Done]
