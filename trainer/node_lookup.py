"""``python -m trainer.node_lookup GCS ADDRESS``: the id of the node that the cluster's GCS shows alive at an address.

For a host that cannot reach the head's dashboard, because that listens on the head's own loopback. Runs in the
application's interpreter, as a process of its own: Ray's client takes 100 MB and is needed once. Looks until it has
found the node, prints its id (hex) and ends; prints `refused` where the GCS refuses the run's token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

from trainer.ray_node import NODE_REFUSED

ASK_S: Final = 5.0
LOOK_S: Final = 0.5


def alive_at(gcs: str, address: str) -> list[str]:
    """Ids of the alive nodes with that address. Raises whatever Ray's client raises."""
    from ray._raylet import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = GcsClient(address=gcs).get_all_node_info(timeout=ASK_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    return [each.node_id.hex() for each in nodes.values() if each.node_manager_address == address]


def main(arguments: Sequence[str]) -> int:
    gcs, address = arguments
    said = ""
    while True:
        try:
            found = alive_at(gcs, address)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if told != said:
                print(said := told, file=sys.stderr, flush=True)
            if "Unauthenticated" in told or "UNAUTHENTICATED" in told:
                print(NODE_REFUSED, flush=True)
                return 0
            found = []
        if len(found) == 1:
            print(found[0], flush=True)
            return 0
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
