"""What a search learns by: each part can be switched off, to show what it is worth (`autotune backtest --without`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The parts of learning, all on by default.

    Args:
        calibration: the physical parameters of time and memory learn; without, they stay as assumed, and certain.
        residual: what similar plans share beyond them is learned; without, only the parameters learn.
        p_fits: plans are weighed by their probability to fit; without, every plan is believed to fit.
    """

    calibration: bool = True
    residual: bool = True
    p_fits: bool = True


EVERYTHING = Learning()
