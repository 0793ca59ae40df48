"""The census finds each kind of leak when one is planted, and nothing when there is none. No run is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.census import SAMPLE_S, Census
from tests.integration.stack import BUCKET, Stack, bare

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RETITLED = """
import ctypes, sys, time
print("up", flush=True)
sys.stdin.readline()
# As programs that set their own title do: the environment that /proc shows is overwritten.
start, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
ctypes.memset(start, 0, end - start)
print("retitled", flush=True)
time.sleep(600)
"""


@contextmanager
def planted(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def marked(stack: Stack) -> dict[str, str]:
    return {**bare(), "LANYARD_CUSTODY": f"{stack.mark}-planted-0123456789"}


def test_a_stack_without_runs_has_left_nothing(census: Census) -> None:
    assert census.settled(10).lines() == []


def test_it_finds_marked_processes_what_they_listen_on_and_what_they_use(stack: Stack, census: Census) -> None:
    name = f"planted-{os.getpid()}-{stack.mark}"
    program = (
        "import socket,sys,time; s = socket.create_server(('127.0.0.1', 0)); "
        f"f = open('/dev/shm/{name}', 'w'); print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    try:
        with planted([sys.executable, "-c", program], env=marked(stack)) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            found = census.take()
            assert any(f"process {process.pid} " in each for each in found.processes)
            assert found.ports == (f"port {port} of process {process.pid}",)
            assert found.entries == (f"entry /dev/shm/{name}",)
        # The process is gone; what it made is not.
        assert census.take().entries == (f"entry /dev/shm/{name}",)
        assert census.take().processes == ()
    finally:
        Path(f"/dev/shm/{name}").unlink(missing_ok=True)
    assert census.settled(10).lines() == []


def test_it_finds_descendants_without_the_mark_and_those_that_lost_both(stack: Stack, census: Census) -> None:
    child = (
        f"import subprocess,sys; p = subprocess.Popen([sys.executable, '-c', {RETITLED!r}], stdin=0, env={{'A': 'b'}});"
    )
    with planted([sys.executable, "-c", f"{child} p.wait()"], env=marked(stack)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        found = census.take().processes
        assert len(found) == 2
        time.sleep(2 * SAMPLE_S)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "retitled\n"
        process.kill()
        process.wait()
        [orphan] = census.take().processes
        assert set(Path(f"/proc/{orphan.split()[1]}/environ").read_bytes()) <= {0}
        assert f"process {process.pid} " not in orphan
        assert census.end_leftovers() == [orphan]
    assert census.settled(10).lines() == []


def test_it_finds_processes_that_work_in_the_home_but_not_the_services(stack: Stack, census: Census) -> None:
    with planted(["sleep", "600"], cwd=stack.home / "logs") as inside, planted(["sleep", "600"]) as outside:
        found = census.take().processes
        assert [f"process {inside.pid} " in each for each in found] == [True]
        assert not any(f"process {outside.pid} " in each for each in found)
    assert census.settled(10).lines() == []


def test_it_finds_open_workflows_unfinished_uploads_and_scratch_files(stack: Stack, census: Census) -> None:
    upload = stack.s3.create_multipart_upload(Bucket=BUCKET, Key="planted/upload")["UploadId"]
    left = stack.scratch / "left-behind"
    left.touch()
    name = f"{stack.mark}-planted"
    stack.cli("workflow", "start", "--type", "Nothing", "--task-queue", "nobody", "--workflow-id", name)
    try:
        ends = time.monotonic() + 30
        while not (found := census.take()).workflows:  # visibility follows within seconds
            assert time.monotonic() < ends
        assert found.workflows == (f"open workflow default/{name}",)
        assert found.uploads == ("unfinished upload planted/upload",)
        assert found.entries == (f"entry {left}",)
    finally:
        stack.cli("workflow", "terminate", "--workflow-id", name)
        stack.s3.abort_multipart_upload(Bucket=BUCKET, Key="planted/upload", UploadId=upload)
        left.unlink()
    assert census.settled(30).lines() == []


def test_a_port_of_somebody_else_is_nobodys_leak(census: Census) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert census.settled(10).lines() == []
