"""Currency: whether an entry was measured in the environment that is there now, and if not, what changed since."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.specs import Fingerprint

MOMENTARY = frozenset({"hostname", "clocks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing of the environment that is another one now. Empty text: it was not there, or could not be read."""

    name: str
    then: str
    now: str

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.name}: {self.then or 'none'} then, {self.now or 'none'} now"


def changes(then: Fingerprint, now: Fingerprint) -> list[Change]:
    """What differs between two environments, by field; entries of dictionaries by their own names."""
    found = []
    for name in Fingerprint.model_fields:
        if name in MOMENTARY:
            continue
        old, new = getattr(then, name), getattr(now, name)
        if isinstance(old, dict):
            keys = sorted(set(old) | set(new))
            found += [Change(name=key, then=str(old.get(key, "")), now=str(new.get(key, ""))) for key in keys]
        else:
            found.append(Change(name=name, then=str(old), now=str(new)))
    return [item for item in found if item.then != item.now]
