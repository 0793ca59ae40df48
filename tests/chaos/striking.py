"""What happens to a victim: how each is found, struck and mended. Found with the census's eyes, ended by exact pid."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from typing import Any, Final

from tests.chaos.lane import Lane
from tests.chaos.runs import PREFIX
from tests.chaos.tempo import HEARTBEAT_S
from tests.integration.census import Census, Proc

DOWN_S: Final = {"light": 1.5, "real": 4.0}
"""How long a server stays down, and a disk full, and a network cut."""
FOUND_WITHIN_S: Final = 15.0


class NoVictim(Exception):
    """What was to be struck is not there."""


class Striker:
    """Strikes one victim of one scenario."""

    def __init__(self, lane: Lane, census: Census, key: str, chances: random.Random) -> None:
        self._lane, self._census, self._key, self._chances = lane, census, key, chances
        self._down_s = DOWN_S[lane.which]
        self._aimed: Proc | None = None

    async def prepare(self, victim: str) -> None:
        """What has to be there before the run starts."""
        if victim == "disk full":
            await self._lane.kill("s3")
            await self._lane.start_s3(small=True)
        if victim in ("worker", "everything of the operator", "worker gone long", "two workers"):
            await self._lane.keep_a_spare()

    async def strike(self, victim: str) -> None:
        """Strike; whoever is held may go on afterwards, into whatever is left of its world."""
        lane = self._lane
        match victim:
            case "worker" | "worker gone long" | "newer code" | "empty home" | "threads blocked":
                await lane.kill("worker")
            case "temporal" | "s3":
                await lane.kill(victim)
            case "everything of the operator":
                await lane.kill("worker", "temporal", "s3")
            case "network":
                lane.cut.touch()
            case "disk full":
                await asyncio.to_thread(lane.fill_disk)
            case "two workers":
                # Stopped and not ended: it goes on later with attempts that the second one has taken over.
                lane.send(signal.SIGSTOP)
                await lane.start_worker("worker-two")
            case "nobody":
                pass
            case _:
                await asyncio.to_thread(self._strike_cluster)

    async def mend(self, victim: str) -> None:
        """Put things right again, when the time has come."""
        lane = self._lane
        match victim:
            case "worker":
                await lane.start_worker()
            case "worker gone long":
                await asyncio.sleep(1.5 * HEARTBEAT_S[lane.which])
                await lane.start_worker()
            case "newer code":
                await lane.start_worker(variant="newer")
            case "threads blocked":
                await lane.start_worker(variant="blocked")
            case "empty home":
                await lane.start_worker(home=lane.root / f"elsewhere-{self._key}")
                await asyncio.sleep(HEARTBEAT_S[lane.which] + 4)
            case "temporal":
                await asyncio.sleep(self._down_s)
                await lane.start_temporal()
            case "s3":
                await asyncio.sleep(self._down_s)
                await lane.start_s3()
            case "everything of the operator":
                await asyncio.sleep(self._down_s)
                await asyncio.gather(lane.start_temporal(), lane.start_s3())
                await lane.start_worker()
            case "network":
                await asyncio.sleep(2 * self._down_s)
                lane.cut.unlink()
            case "disk full":
                await asyncio.sleep(2 * self._down_s)
                await asyncio.to_thread(lane.free_disk)
            case "two workers":
                await asyncio.sleep(1.5 * HEARTBEAT_S[lane.which])
                lane.send(signal.SIGCONT)

    async def home_again(self) -> None:
        """After `empty home`: the worker that has the hosts' home again."""
        await self._lane.kill("worker")
        await self._lane.start_worker()

    async def leave(self, victim: str) -> None:
        """After the scenario: the lane as the next one expects it."""
        lane = self._lane
        lane.cut.unlink(missing_ok=True)
        if lane.alive("worker-two"):
            await lane.end("worker-two")
        if victim == "disk full":
            await lane.kill("s3")
        for name, start in (("temporal", lane.start_temporal), ("s3", lane.start_s3)):
            if not lane.alive(name):
                await start()
        if victim in ("newer code", "threads blocked") and lane.alive("worker"):
            await lane.kill("worker")
        if not lane.alive("worker"):
            await lane.start_worker()

    async def aim(self, victim: str) -> None:
        """Choose which process of the cluster it will be. Raises NoVictim."""
        ends = asyncio.get_running_loop().time() + FOUND_WITHIN_S
        while not (found := await asyncio.to_thread(self._find, victim)):
            if asyncio.get_running_loop().time() > ends:
                raise NoVictim(f"no {victim} to be found")
            await asyncio.sleep(0.2)
        self._aimed = self._chances.choice(sorted(found, key=lambda each: each.pid))

    def _strike_cluster(self) -> None:
        """Kill the one that was aimed at. Raises NoVictim when it is gone: what was not struck proves nothing."""
        assert self._aimed is not None
        gone = NoVictim(f"process {self._aimed.pid} was gone before it was struck")
        try:
            handle = os.pidfd_open(self._aimed.pid)
        except ProcessLookupError:
            raise gone from None
        try:
            if not any(each.who == self._aimed.who for each in self._census.living()):
                raise gone
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)

    def _find(self, victim: str) -> list[Proc]:
        living = self._census.living()
        light = self._lane.which == "light"
        match victim:
            case "dashboard":
                mark = [b"cluster.py", b"\0dashboard\0"] if light else [b"dashboard/dashboard.py"]
            case "raylet":
                mark = [b"cluster.py", b"1.order.json\0raylet\0"] if light else [b"raylet/raylet", b".3\0"]
            case "hosting service":
                mark = [b"light/host.py"] if light else [b"trainer.hosting", b"--prepared"]
            case "driver":
                return [each for each in living if _is_driver(each.command)]
            case _:
                wanted = self._ranks()
                return [each for each in living if each.who in wanted]
        return [each for each in living if all(part in each.command for part in mark)]

    def _ranks(self) -> set[tuple[int, int]]:
        """Pid and start time of the newest attempt's workers, from their own evidence."""
        root = f"{PREFIX}/{self._key}/evidence/main/"
        told = self._lane.s3.list_objects_v2(Bucket="lanyard", Prefix=root)
        names = sorted(each["Key"] for each in told.get("Contents", ()) if each["Key"].endswith(".start.json"))
        newest = [name for name in names if name.rsplit("/", 1)[0] == names[-1].rsplit("/", 1)[0]]
        found: set[tuple[int, int]] = set()
        for name in newest:
            document: dict[str, Any] = json.loads(self._lane.s3.get_object(Bucket="lanyard", Key=name)["Body"].read())
            found.add((document["process"]["pid"], document["process"]["start_time"]))
        return found


def _is_driver(command: bytes) -> bool:
    program = b"trainer.application" in command or b"train.py" in command
    return program and b"lease_keeper" not in command and not command.startswith((b"/bin/sh", b"/bin/bash", b"bash"))
