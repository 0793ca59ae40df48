"""The hosting service as it is, with `light_ray.py` in place of Ray and a directory in place of S3.

    python light_host.py --order FILE [--detach]

Storage is `file:///DIR`; while `DIR/outage` exists no look at it succeeds. Bounds come from LIGHT_TIMING (JSON).
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the provider passes on no PYTHONPATH

from trainer import hosting, ray_node
from trainer.lease import Observation
from trainer.private import NotPrivate, create_private_directory, write_private_file

RECORD = {
    "versions": {"ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0", "pyarrow": "21.0.0"},
    "torch": "2.13.0+cpu",
    "python": "3",
    "requirements_hash": "e" * 64,
    "freeze_sha256": "f" * 64,
}


def main() -> int:
    os.umask(0o077)
    order = hosting.read_order(Path(sys.argv[2]))
    storage = Path(order["storage"].removeprefix("file://"))
    if "--detach" in sys.argv:
        hosting.detach()
    try:
        create_private_directory(Path(order["private_dir"]))
    except NotPrivate as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return hosting.REFUSED
    write_private_file(Path(order["private_dir"]) / "environment.json", json.dumps(RECORD).encode())

    def observe() -> Observation:
        if (storage / "outage").exists():
            raise OSError("storage does not answer")
        lease = storage / "custody/lease.json"
        stone = (storage / "custody/tombstone.json").exists()
        return Observation(lease.read_bytes() if lease.exists() else None, "present" if stone else "absent")

    def put_receipt(data: bytes) -> None:
        place = storage / f"hosts/{order['index']}/receipt.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    timing = {
        "look_every_s": 0.1,
        "lease_wait_s": 2.0,
        "start_s": 20.0,
        "grace_s": 0.5,
        "tombstone_grace_s": 0.2,
        "kill_s": 10.0,
    }
    return hosting.Service(
        order,
        observe=observe,
        put_receipt=put_receipt,
        command=[sys.executable, str(Path(__file__).with_name("light_ray.py")), sys.argv[2]],
        ask=lambda token: ray_node.node_id(order, token),
        told_to_end=lambda: (storage / hosting.END).exists(),
        timing=hosting.Timing(**{**timing, **json.loads(os.environ.get("LIGHT_TIMING", "{}"))}),
    ).run()


if __name__ == "__main__":
    sys.exit(main())
