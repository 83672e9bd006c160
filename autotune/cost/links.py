"""Collectives over the links inside a node: what starting one, each step of its ring and each byte costs.

time = start + step * steps + traffic / (rate * share * (1 - few / n)), rate the catalog's: a group of few ranks cannot
fill all of a device's links. The constants were fitted (robust least squares in log time) to 1,927 published readings
of 1-600 MB: NVLink 3 on A100 (273), 4 on H100 and H200 (924), 5 on B200 (730). They meet them within 9, 11 and 15 % on
average; 15 us a step and 0.8 of the rate, which stood here before, were off by 23, 49 and 52 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.specs import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Constants of one kind of link. `share` is what large groups reach of the rate, `few` what small ones lack."""

    start_s: float
    step_s: float
    share: float
    few: float


_KNOWN = {
    "NVLink 3": Ring(start_s=28e-6, step_s=1.7e-6, share=0.77, few=0.44),
    "NVLink 4": Ring(start_s=12e-6, step_s=0.8e-6, share=0.76, few=0.56),
    "NVLink 5": Ring(start_s=14e-6, step_s=1.1e-6, share=0.68, few=0.67),
}

UNREAD = Ring(start_s=20e-6, step_s=1.5e-6, share=0.8, few=0.45)
"""Assumption for links that nobody read: between those above."""


def ring_of(link: Link) -> Ring:
    """The constants of the link's kind, UNREAD if it is none of those measured."""
    return _KNOWN.get(link.name, UNREAD)
