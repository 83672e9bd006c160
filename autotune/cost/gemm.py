"""How much of a device's matrix rate a product of a given shape reaches.

time = flops / (peak * best) * (1 + depth / k) * (1 + waves / w), with w = m*n / (128 * 128 * processors) the tiles of
128 x 128 a processor: a short k pays for filling and draining the pipeline of a tile, few tiles leave processors idle
(tile and wave quantisation, NVIDIA's Matrix Multiplication Background guide, smoothed). The three constants a
generation were fitted to 1,615-2,160 published bf16 timings each (m >= 512, n and k >= 256); leaving out all
shapes of one m moves best and depth by under a tenth and waves by up to a quarter, and the timings left out are met
within 4-12 % on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.table import FloatColumn
from autotune.specs import Device

TILE = 128.0 * 128.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Shape constants of one generation. `best` is the share of the dense peak of a large product.

    `sustained` is what training keeps up of it: a benchmark of one product runs at higher clocks than hours of them.
    `attention` is the share of the peak that a fused attention kernel reaches in training, counted at half of s²: below
    what its authors measure (Dao 2023, arXiv:2307.08691), since head dims of 64-128 and the causal edge cost more.
    """

    best: float
    sustained: float
    depth: float
    waves: float
    processors: int
    attention: float

    def padding(self, m: FloatColumn | float, n: FloatColumn | float, k: FloatColumn | float) -> FloatColumn:
        """Time of an m x n x k product over that of the same FLOPs in a large one."""
        tiles = np.asarray(m, dtype=np.float64) * n / (TILE * max(self.processors, 1))
        padded: FloatColumn = (1.0 + self.depth / np.asarray(k, dtype=np.float64)) * (1.0 + self.waves / tiles)
        return padded


PLAIN = Gemm(best=0.70, sustained=1.0, depth=0.0, waves=0.0, processors=1, attention=0.70)
"""Of a device whose shapes nobody measured: one efficiency for all."""

_GENERATIONS = {
    "a100": Gemm(best=0.84, sustained=0.97, depth=107.0, waves=0.08, processors=108, attention=0.33),
    "h100": Gemm(best=0.825, sustained=0.82, depth=150.0, waves=0.11, processors=132, attention=0.20),
    "h200": Gemm(best=0.81, sustained=0.82, depth=120.0, waves=0.06, processors=132, attention=0.20),
}


def gemm_of(device: Device) -> Gemm:
    """The constants of the device's generation, PLAIN if it is none of those measured."""
    return _GENERATIONS.get(device.name.partition("-")[0], PLAIN)
