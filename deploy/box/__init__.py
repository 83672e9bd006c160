"""A cluster in a box: nodes as network namespaces on rate-limited links, with real workers, servers and API.

For people `make box`; for tests::

    with Box(nodes=2, ranks=4, rate_mbit=400) as box:
        ...  # box.url, box.database_url, box.broker_url, box.key, box.nodes, box.pids
        box.set_rate("node1", 50)
        box.link_down("node1")
"""

from deploy.box.box import Box
from deploy.box.processes import BoxError

__all__ = ["Box", "BoxError"]
