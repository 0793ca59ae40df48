"""The hosting service as it is, on the light storage and with `light/cluster.py` in place of Ray.

    python host.py --order FILE [--detach]

Its bounds are shorter than a real host's (see TIMING); the application environment is only said to be there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the provider passes on no PYTHONPATH

from tests.chaos.light import storage
from trainer import hosting, ray_node
from trainer.private import NotPrivate, create_private_directory, write_private_file

RECORD = {
    "versions": {"ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0", "pyarrow": "21.0.0"},
    "torch": "2.13.0+cpu",
    "python": "3",
    "requirements_hash": "e" * 64,
    "freeze_sha256": "f" * 64,
}
"""What `trainer.environment` records of an application environment."""

TIMING = hosting.Timing(
    look_every_s=0.4,
    tombstone_grace_s=20.0,
    lease_wait_s=20.0,
    start_s=30.0,
    receipt_s=30.0,
    grace_s=2.0,
    kill_s=10.0,
)


def main() -> int:
    """Serve until the end; the exit status of the real service."""
    os.umask(0o077)
    order_file = Path(sys.argv[2])
    order = hosting.read_order(order_file)
    if "--detach" in sys.argv:
        hosting.detach()
    private = Path(order["private_dir"])
    try:
        create_private_directory(private)
    except NotPrivate as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return hosting.REFUSED
    state = hosting.State(order)
    state.write("preparing")
    write_private_file(private / "environment.json", json.dumps(RECORD).encode())
    store = storage.filesystem(request_timeout_s=3, attempts=storage.HASTY_ATTEMPTS)
    root = order["storage"].removeprefix("s3://")
    os.chdir(private)
    return hosting.Service(
        order,
        observe=lambda: storage.observe_lease(store, root),
        put_receipt=lambda data: storage.put_once(store, f"{root}/hosts/{order['index']}/receipt.json", data),
        command=[sys.executable, "-S", str(Path(__file__).with_name("cluster.py")), str(order_file)],
        ask=lambda token: ray_node.node_id(order, token),
        timing=TIMING,
    ).run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not held up by a look at storage that is still waiting for an answer
