from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from tests.worker.conftest import HERE, StackProcess, Terminal, clean_environment
from worker import processes, stack
from worker.home import Home, write_private
from worker.services import BUCKET, Addresses, Service, s3_client
from worker.settings import Settings
from worker.stack import Stack, StackError, StackRecord

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

MakeStack = Callable[[str], StackProcess]


def put(of: StackProcess, key: str, body: bytes) -> None:
    s3_client(Addresses(of.record.ports).s3, of.home.credentials()).put_object(Bucket=BUCKET, Key=key, Body=body)


def get(of: StackProcess, key: str) -> bytes:
    answer = s3_client(Addresses(of.record.ports).s3, of.home.credentials()).get_object(Bucket=BUCKET, Key=key)
    return answer["Body"].read()


def test_two_stacks_run_side_by_side_and_a_shell_becomes_a_client_of_either(make_stack: MakeStack) -> None:
    one, two = make_stack("one"), make_stack("two with ' blanks")
    one.start()
    two.start()
    assert not set(one.record.ports.values()) & set(two.record.ports.values())
    put(one, "a/b", b"one")
    put(two, "a/b", b"two")
    assert (get(one, "a/b"), get(two, "a/b")) == (b"one", b"two")
    for each in (one, two):
        assert stat.S_IMODE(each.home.env.stat().st_mode) == 0o600
        assert stat.S_IMODE(each.home.root.stat().st_mode) == 0o700
        assert each.shell('echo "$LANYARD_HOME"') == str(each.home.root)
        assert each.shell("temporal operator cluster health") == "SERVING"
        assert each.shell("temporal operator search-attribute list | grep -c Lanyard") == "6"
        assert '"Reaper"' in each.shell('temporal schedule describe --schedule-id "reaper-$LANYARD_DEPLOYMENT" -o json')
        listing = 'import boto3; print(boto3.client("s3").list_objects_v2(Bucket="lanyard")["Contents"][0]["Key"])'
        assert each.shell(f"python -c '{listing}'") == "a/b"
    assert one.shell('echo "$LANYARD_DEPLOYMENT"') != two.shell('echo "$LANYARD_DEPLOYMENT"')


def test_services_listen_on_loopback_alone_and_no_secret_is_in_a_command_line(shared_stack: StackProcess) -> None:
    credentials = shared_stack.home.credentials()
    secrets = [
        credentials.access_key.get_secret_value().encode(),
        credentials.secret_key.get_secret_value().encode(),
        shared_stack.home.secret().read_bytes().strip(),
    ]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        assert not any(secret in line for secret in secrets), path
    for log in shared_stack.home.logs.iterdir():
        assert not any(secret in log.read_bytes() for secret in secrets), log
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert not any(secret in shared_stack.home.record.read_bytes() for secret in secrets)
    for name in ("temporal", "s3"):
        service = shared_stack.record.services[name]
        connections = psutil.Process(service.process.pid).net_connections(kind="tcp")
        ours = [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
        assert ours
        assert set(ours) == {"127.0.0.1"}


def test_a_second_stack_in_the_same_home_says_so_and_leaves(shared_stack: StackProcess) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "supervise.py")],
        env={**clean_environment(), "LANYARD_HOME": str(shared_stack.home.root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "already running" in done.stderr
    assert str(shared_stack.process.pid) in done.stderr
    assert sorted(shared_stack.services_alive()) == ["s3", "temporal", "worker"]


def test_a_service_that_is_killed_comes_back_on_its_port_with_its_data(make_stack: MakeStack) -> None:
    one = make_stack("one")
    one.start()
    put(one, "kept", b"across kill -9")
    ports = one.record.ports
    for name in ("s3", "temporal", "worker"):
        before = one.record.services[name]
        os.kill(before.process.pid, signal.SIGKILL)
        one.wait_to_say(f"{name} is up again")
        after = one.record.services[name]
        assert after.process != before.process
        assert after.restarts == 1
        assert f"{name} ended with -9; starting it again" in one.text()
    assert one.record.ports == ports
    assert get(one, "kept") == b"across kill -9"
    assert one.shell("temporal operator cluster health") == "SERVING"


def test_a_killed_supervisor_takes_its_services_along_and_the_next_finds_all_state(make_stack: MakeStack) -> None:
    one = make_stack("one")
    one.start()
    put(one, "kept", b"data")
    one.shell("temporal workflow start --type Custody --task-queue elsewhere --workflow-id left-open")
    ports, credentials = one.record.ports, one.home.credentials()
    services = one.record.services
    one.send(signal.SIGKILL)
    for service in services.values():
        processes.end(service.process, 5)  # waits; the kernel has ended them already
        assert not processes.alive(service.process)
    assert one.home.env.exists(), "the dead stack left its env file"
    one.start()
    assert one.record.ports == ports
    assert one.home.credentials() == credentials
    assert get(one, "kept") == b"data"
    assert "STATUS_RUNNING" in one.shell("temporal workflow describe --workflow-id left-open --output json")
    assert one.send(signal.SIGTERM) == 0
    assert "1 run(s) are not finished" in one.text()


def test_leftovers_are_ended_by_exact_identity_and_strangers_are_left_alone(make_stack: MakeStack) -> None:
    one = make_stack("one")
    one.home.prepare()
    leftover = subprocess.Popen(["sleep", "60"])
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        ours, theirs = processes.identify(leftover.pid), processes.identify(stranger.pid)
        assert ours is not None
        assert theirs is not None
        reused = theirs.model_copy(update={"start_time": theirs.start_time - 1})
        record = StackRecord(
            state="up",
            supervisor=reused,
            ports={},
            services={
                "s3": stack.ServiceRecord(process=ours, log=""),
                "temporal": stack.ServiceRecord(process=reused, log=""),
            },
        )
        write_private(one.home.record, json.dumps(record.model_dump()))
        one.start()
        assert leftover.wait(5) == -signal.SIGTERM
        assert stranger.poll() is None
        assert f"ended s3 of an earlier stack (process {leftover.pid})" in one.text()
    finally:
        leftover.kill()
        stranger.kill()
        leftover.wait()
        stranger.wait()


def test_ctrl_c_stops_everything_in_order_and_removes_the_env_file(make_stack: MakeStack) -> None:
    one = make_stack("one")
    one.start()
    services = one.record.services
    assert one.send(signal.SIGINT) == 0
    assert not any(processes.alive(service.process) for service in services.values())
    assert not one.home.env.exists()
    assert one.record.state == "stopped"
    assert "stopping: worker, then S3, then Temporal" in one.text()


def left_by(of: StackProcess) -> tuple[bool, str, list[str]]:
    """What a stack that is stopped must not leave: its keys, a state that is not so, services."""
    return of.home.env.exists(), of.record.state, of.services_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stack_whose_reader_is_gone_stops_as_any_other(make_stack: MakeStack, number: signal.Signals) -> None:
    """`make stack 2>&1 | tee log`: Ctrl-C ends `tee` too, so everything that is said from then on fails."""
    one = make_stack("one")
    process = subprocess.Popen(one.command, env=one.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout
        assert any(b"Ctrl-C here stops" in line for line in process.stdout)
        process.stdout.close()
        process.send_signal(number)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert left_by(one) == (False, "stopped", [])


def test_a_stack_whose_terminal_closes_stops_as_any_other(make_stack: MakeStack) -> None:
    one = make_stack("one")
    terminal = Terminal(one.command, one.environment)
    try:
        terminal.read_until("Ctrl-C here stops")
        terminal.close()
        terminal.process.send_signal(signal.SIGHUP)  # the shells above repeat it: that is no wish to hurry
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(60) == 0
    finally:
        terminal.end()
    assert left_by(one) == (False, "stopped", [])


def test_a_stack_that_never_had_a_terminal_comes_up_and_stops_as_any_other(make_stack: MakeStack) -> None:
    one = make_stack("one")
    process = subprocess.Popen(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *one.command], env=one.environment)
    try:
        deadline = time.monotonic() + 60
        while (record := StackRecord.read(one.home)) is None or record.state != "up":
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert left_by(one) == (False, "stopped", [])


def test_under_nohup_a_stack_outlives_its_terminal(make_stack: MakeStack) -> None:
    one = make_stack("one")
    terminal = Terminal(["bash", "-c", 'trap "" HUP; exec "$@"', "bash", *one.command], one.environment)
    try:
        terminal.read_until("Ctrl-C here stops")
        terminal.close()
        with pytest.raises(subprocess.TimeoutExpired):
            terminal.process.wait(2)
        assert sorted(one.services_alive()) == ["s3", "temporal", "worker"]
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(60) == 0
    finally:
        terminal.end()
    assert left_by(one) == (False, "stopped", [])


def broken_worker(code: str, ready: bool) -> stack.MakeWorker:
    async def check(_pid: int) -> None:
        if not ready:
            raise RuntimeError("never")

    def make(environment: Mapping[str, str], _addresses: Addresses) -> Service:
        return Service(
            name="worker",
            command=(sys.executable, "-c", code),
            environment=environment,
            directory=Path("/"),
            ready=check,
            ready_within_s=3,
            grace_s=1,
        )

    return make


async def test_a_worker_that_cannot_start_is_told_with_its_log_and_nothing_is_left(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    settings = Settings.load({"LANYARD_HOME": str(home.root), "TEMPORAL_CONFIG_FILE": os.devnull})
    broken = Stack(home, settings, print, broken_worker("raise SystemExit('no such setting')", ready=False))
    with pytest.raises(StackError, match=r"worker ended with 1 before it was ready(.|\n)*no such setting"):
        await broken.start()
    record = StackRecord.read(home)
    assert record is not None
    assert record.state == "stopped"
    assert not any(processes.alive(service.process) for service in record.services.values())
    assert not home.env.exists()


async def test_a_service_that_keeps_dying_ends_the_stack_after_a_bounded_number_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "RESTART_DELAYS_S", (0.01, 0.01))
    home = Home(tmp_path / "home")
    settings = Settings.load({"LANYARD_HOME": str(home.root), "TEMPORAL_CONFIG_FILE": os.devnull})
    said: list[str] = []
    dying = Stack(
        home, settings, said.append, broken_worker("import time; time.sleep(0.3); print('again')", ready=True)
    )
    await dying.start()
    try:
        reason = await asyncio.wait_for(dying.failed, 30)
    finally:
        await dying.stop()
    assert "3 times within 10 minutes" in reason
    assert "again" in reason
    assert sum("starting it again" in line for line in said) == 2
