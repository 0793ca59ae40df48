"""Bad input and bad settings, one of each kind, through the real `temporal` CLI.

Each must end the run Failed (never a workflow task that is tried for ever) with one message that names the field or the
setting and the remedy, before anything is created: no process was seen, no object is left, custody is closed. A case
takes a second or two; those that need another worker give it a namespace of its own.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.census import Census
from tests.integration.refusing_s3 import refusing_writes
from tests.integration.runs import INTERVAL, PREFIX, STEPS, regression, script
from tests.integration.stack import BUCKET, CHECKOUT, Stack, Started
from tests.wheels import offer, only_offered
from trainer import environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_number = itertools.count(1)


def changed(change: Callable[[dict[str, Any]], object], **more: Any) -> str:
    """A good run.json with one thing made bad."""
    run = deepcopy(regression("bad-input", **more))
    change(run)
    return json.dumps(run)


def with_uri(uri: str) -> str:
    return changed(lambda run: run.update(storage={"uri": uri}))


def with_drill(step: int) -> str:
    return changed(lambda run: None, drill={"kind": "worker", "after_step": step})


def encoded(content: bytes, encoding: str) -> tuple[str, ...]:
    return (
        *("--input", base64.b64encode(content).decode(), "--input-base64"),
        *("--input-meta", f"encoding={encoding}"),
    )


@dataclass(frozen=True)
class Case:
    """What the CLI is given, and what the message must say: the field, and what to do about it."""

    inputs: tuple[str, ...]
    says: tuple[str, ...]
    given: tuple[str, ...] = ()


GOOD = json.dumps(regression("bad-input"))
PLANTED = f"{PREFIX}/planted"

CASES = {
    "no input": Case((), ("no input was given", "--input-file run.json")),
    "two inputs": Case((GOOD, GOOD), ("2 inputs were given", "exactly one")),
    "another encoding": Case((), ("binary/encrypted", "json/plain"), given=encoded(b"\0\1", "binary/encrypted")),
    "raw bytes": Case((), ("raw bytes", "one JSON object"), given=encoded(b"\0\1", "binary/plain")),
    "a payload that is not what it says": Case(
        (), ("cannot be decoded", "json/plain"), given=encoded(b"\xff", "binary/protobuf")
    ),
    "a list": Case(("[]",), ("a list", "one JSON object")),
    "null": Case(("null",), ("null", "one JSON object")),
    "JSON in quotation marks": Case((json.dumps(GOOD),), ("text", "one JSON object")),
    "an unknown field": Case((changed(lambda run: run.update(storrage=1)),), ("storrage", "did you mean storage?")),
    "a missing field": Case((changed(lambda run: run.pop("storage")),), ("storage", "add it")),
    "a wrong type": Case((changed(lambda run: run["workload"]["recipe"].update(steps="32")),), ("steps", "whole")),
    "out of range": Case((changed(lambda run: run["workload"]["recipe"].update(momentum=1.5)),), ("momentum", "1")),
    "a duration without unit": Case(
        (changed(lambda run: run.update(limits={"stall": 300})),), ("limits.stall", '"90s"')
    ),
    "a drill between commits": Case(
        (with_drill(INTERVAL + 1),), ("drill.after_step", f"multiple of checkpoint_interval ({INTERVAL})")
    ),
    "a drill too late": Case((with_drill(STEPS),), ("drill.after_step", f"at most {STEPS - INTERVAL}")),
    "one worker": Case((changed(lambda run: run["hosts"].update(count=1)),), ("hosts.count", "2")),
    "a storage URI with credentials": Case(
        (with_uri("s3://key:word@lanyard/runs"),), ("storage.uri", "AWS_ACCESS_KEY_ID")
    ),
    "a storage URI with a query": Case((with_uri("s3://lanyard/runs?region=x"),), ("storage.uri", "no query")),
    "a storage URI that climbs": Case((with_uri("s3://lanyard/runs/../other"),), ("storage.uri", "'..'")),
    "a storage URI without prefix": Case((with_uri("s3://lanyard"),), ("storage.uri", "must name a prefix")),
    "another scheme": Case((with_uri("gs://lanyard/runs"),), ("storage.uri", "s3://")),
    "an unknown provider": Case(
        (changed(lambda run: run["hosts"].update(provider="slurm")),), ("hosts.provider", "local")
    ),
    "a name for no Jobs API": Case((changed(lambda run: run.update(name="a/b c")),), ("name", "lower-case letters")),
    "cuda on local hosts": Case((changed(lambda run: run["hosts"].update(device="cuda")),), ("hosts.device", "cpu")),
    "parity without drill": Case((changed(lambda run: run.update(parity=True)),), ("parity", "add a drill")),
    "a shell line as entrypoint": Case(
        (changed(lambda run: run.update(workload={**script("x", "y")["workload"], "entrypoint": "a | b"})),),
        ("workload.entrypoint", "shell syntax"),
    ),
    # From here on what only preflight can find out.
    "a provider that this worker does not have, or a cloud that it cannot rent from": Case(
        ((CHECKOUT / "examples" / "b200x2.json").read_text(),),
        ("hosts.infra", "nebius", "use slurm/")
        if (CHECKOUT / ".venv-skypilot").exists()
        else ("hosts.provider", "skypilot", "it has"),
    ),
    "a bucket that does not exist": Case(
        (with_uri("s3://no-such-bucket-here/runs"),), ("storage.uri", "NoSuchBucket", "create the bucket")
    ),
    "a prefix that holds a run": Case(
        (with_uri(f"s3://{BUCKET}/{PLANTED}/run"),), ("storage.uri", "already holds a run", '"resume"')
    ),
    "a prefix inside of a run": Case(
        (with_uri(f"s3://{BUCKET}/{PLANTED}/run/a/b"),), ("storage.uri", "already holds a run")
    ),
    "a prefix with another project's state": Case(
        (with_uri(f"s3://{BUCKET}/{PLANTED}/foreign"),), ("storage.uri", "another project's state")
    ),
    "a working directory that is not there": Case(
        (
            json.dumps(
                {**script("bad-input", "x"), "workload": {**script("x", "y")["workload"], "working_dir": "no/such"}}
            ),
        ),
        ("workload.working_dir", "does not exist"),
    ),
    "resume from nothing": Case(
        (changed(lambda run: None, resume={"from": f"s3://{BUCKET}/{PLANTED}/nothing"}),), ("resume.from", "nothing")
    ),
    "resume from a run without a commit": Case(
        (changed(lambda run: None, resume={"from": f"s3://{BUCKET}/{PLANTED}/run"}),), ("resume.from", "commit")
    ),
    "resume from a damaged commit": Case(
        (changed(lambda run: None, resume={"from": f"s3://{BUCKET}/{PLANTED}/damaged"}),),
        ("resume.from", "loads", "checkpoint_000008"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def planted(stack: Stack) -> None:
    """Prefixes that a new run must not use, or cannot resume from."""
    stack.put(f"{PLANTED}/run/owner.json", json.dumps({"schema": 1, "custody_id": "custody-other"}).encode())
    stack.put(f"{PLANTED}/foreign/terraform.tfstate", b"{}")
    damaged = f"{PLANTED}/damaged"
    commit = {"checkpoint_dir_name": "checkpoint_000008", "metrics": {"step": 8, "loss": 1.0}}
    record = {
        "ray_version": "2.58.0",
        "checkpoint_results": [commit],
        "latest_checkpoint_result": commit,
        "current_report_index": 2,
    }
    stack.put(f"{damaged}/train/main/checkpoint_manager_snapshot.json", json.dumps(record).encode())
    stack.put(f"{damaged}/train/main/checkpoint_000008/checkpoint.pt", b"PK\3\4 half of a file")
    stack.put(f"{damaged}/train/main/checkpoint_000008/journal.json", b'{"schema": 1, "steps": [')


@dataclass
class Before:
    """What was there before a case."""

    objects: list[str]
    processes: int


def look(stack: Stack, census: Census) -> Before:
    return Before(stack.names(""), len(census.seen_processes()))


def refused(stack: Stack, census: Census, run: Started, before: Before) -> str:
    """The message of a run that was refused before anything existed."""
    stack.wait(run, 30)
    assert stack.status(run) == "FAILED"
    kind, message, verdict = stack.failure(run)
    assert (kind, verdict["outcome"], verdict["cleanup"]) == ("rejected", "rejected", "clean"), message
    assert message == f"rejected: {verdict['message']}"
    events = stack.events(run)
    assert len(events) <= 50
    assert not any(each["eventType"] == "EVENT_TYPE_WORKFLOW_TASK_FAILED" for each in events)
    assert census.settled(30).lines() == []
    assert look(stack, census) == before
    return message


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_with_one_message_before_anything_exists(name: str, stack: Stack, census: Census) -> None:
    """See the table."""
    case, before = CASES[name], look(stack, census)
    message = refused(stack, census, stack.begin(f"bad-{next(_number)}", *case.inputs, given=case.given), before)
    print(message)
    assert not [part for part in case.says if part not in message], message
    assert "key:word" not in message


def test_text_that_is_not_json_starts_nothing(stack: Stack, census: Census) -> None:
    """The CLI itself refuses it."""
    before = look(stack, census)
    command = ("workflow", "start", "--type", "GuardedTrain", "--task-queue", "ray-train")
    done = stack.cli(*command, "--workflow-id", f"{stack.mark}-no-json", "--input", "{not json", check=False)
    assert done.returncode != 0
    assert "JSON" in done.stderr
    assert stack.cli("workflow", "describe", "--workflow-id", f"{stack.mark}-no-json", check=False).returncode != 0
    assert look(stack, census) == before


SETTINGS: dict[str, tuple[dict[str, str | None], tuple[str, ...]]] = {
    "wrong-secret-key": ({"AWS_SECRET_ACCESS_KEY": "0" * 40}, ("storage.uri", "correct AWS_SECRET_ACCESS_KEY")),
    "wrong-access-key": ({"AWS_ACCESS_KEY_ID": "0" * 20}, ("storage.uri", "correct AWS_ACCESS_KEY_ID")),
    "no-credentials": (
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "HOME": "/nonexistent"},
        ("storage.uri", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ),
    "unreachable-endpoint": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ("storage.uri", "check AWS_ENDPOINT_URL")),
    "ray-address": ({"RAY_ADDRESS": "http://192.0.2.1:8265"}, ("RAY_ADDRESS", "unset it")),
    "ray-api-server-address": (
        {"RAY_API_SERVER_ADDRESS": "http://192.0.2.1:8265"},
        ("RAY_API_SERVER_ADDRESS", "unset it"),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings_of_a_worker_are_refused_before_anything_exists(name: str, stack: Stack, census: Census) -> None:
    """Another worker, whose environment is wrong, in a namespace of its own (where no search attribute is known)."""
    changed, says = SETTINGS[name]
    with stack.another_worker(name, **changed):
        before = look(stack, census)
        message = refused(stack, census, stack.begin(name, GOOD, namespace=name), before)
        assert not [part for part in says if part not in message], message
        for value in changed.values():
            if value and name != "unreachable-endpoint":
                assert value not in message


def test_the_wrong_torch_build_for_the_profile_is_refused(
    stack: Stack, census: Census, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose application environment is complete and has PyTorch's CUDA build; its wheels are small ones."""
    tmp_path.chmod(0o700)
    pins = environment.pins()
    for name, version in pins.items():
        offer(tmp_path, name, f"{version}+cu130" if name == "torch" else version)
    with monkeypatch.context() as patch:
        only_offered(tmp_path, patch)
        environment.ensure(tmp_path / "environments", device="cuda")
    with stack.another_worker("wrong-torch", LANYARD_ENVIRONMENTS=str(tmp_path / "environments")):
        before = look(stack, census)
        message = refused(stack, census, stack.begin("wrong-torch", GOOD, namespace="wrong-torch"), before)
    assert f"torch is {pins['torch']}+cu130, a CPU profile runs on +cpu" in message
    assert "ensure --rebuild" in message


def test_a_prefix_that_can_be_listed_but_not_written_is_refused(stack: Stack, census: Census) -> None:
    """A list proves nothing: preflight has tried to write, and says which right is missing."""
    with (
        refusing_writes(stack.env["AWS_ENDPOINT_URL"]) as (address, writes),
        stack.another_worker("read-only", AWS_ENDPOINT_URL=address),
    ):
        before = look(stack, census)
        message = refused(stack, census, stack.begin("read-only", GOOD, namespace="read-only"), before)
    assert "storage.uri: cannot write" in message
    assert "read, write and delete" in message
    assert any(PREFIX in path for path in writes)
