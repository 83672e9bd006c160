"""Starting ranks, keeping them warm, running probes on them, and ending them. This side loads no torch."""

from probes.launch.gang import NodeRanks, WorldShare
from probes.launch.placement import Placement
from probes.launch.pool import RankPool
from probes.launch.prober import LocalProber

__all__ = ["LocalProber", "NodeRanks", "Placement", "RankPool", "WorldShare"]
