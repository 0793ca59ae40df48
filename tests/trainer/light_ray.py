"""Stands in for `ray start --block`: leaves descendants of every awkward kind, and answers as the dashboard does.

    python light_ray.py ORDER_FILE

It writes `light.json` into the private directory (pids by kind, and its environment's names), registers its node in
`<storage>/nodes/`, serves the list of nodes when it is the head, and on SIGTERM ends itself alone. The file `die` in
the private directory makes it exit with 3, and `die-once` in the storage does so once, before its
node is known.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
ORPHAN = (
    "import os, subprocess, sys\n"
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True,"
    " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
)

order = json.loads(Path(sys.argv[1]).read_bytes())
private = Path(order["private_dir"])
nodes = Path(order["storage"].removeprefix("file://")) / "nodes"
token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()


class Dashboard(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {token}":
            self.send_error(401)
            return
        listed = [json.loads(each.read_bytes()) for each in sorted(nodes.glob("*.json"))]
        body = json.dumps({"data": {"result": {"result": listed}}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


Path(order["temp_dir"], "session").mkdir()
stubborn = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
orphan = int(subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, check=True).stdout)
# As Ray's agents, whose title overwrites their environment.
silent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
if order["role"] == "head":
    ray = order["ray"]
    for address, port in ((order["address"], ray["gcs_port"]), (ray["dashboard_host"], ray["dashboard_port"])):
        server = http.server.ThreadingHTTPServer((address, port), Dashboard)
        threading.Thread(target=server.serve_forever, daemon=True).start()
early = (nodes.parent / "die-once").exists()
nodes.mkdir(parents=True, exist_ok=True)
facts = {"node_id": f"node{order['index']}", "node_ip": order["address"], "state": "ALIVE"}
if not early:
    (nodes / f"{order['index']}.json").write_text(json.dumps(facts))
light = {
    "ray": os.getpid(),
    "stubborn": stubborn.pid,
    "orphan": orphan,
    "silent": silent.pid,
    "environment": sorted(os.environ),
}
(private / "light.tmp").write_text(json.dumps(light))
(private / "light.tmp").rename(private / ("light-once.json" if early else "light.json"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("light ray is up", flush=True)
if early:
    (nodes.parent / "die-once").unlink()
while not early and not (private / "die").exists():
    time.sleep(0.05)
print("light ray gives up: something exploded", flush=True)
os._exit(3)
