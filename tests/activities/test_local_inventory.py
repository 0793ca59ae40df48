"""What the local provider finds on this machine: everything that carries its mark, whoever died in between, and nothing
that only looks like it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.hosts.local import LocalHosts
from tests.activities.test_local_hosts import (
    Refused,
    mine,
    no,
    order_for,
    prove,
    provider,
    release,
    say,
    services,
    yes,
)
from workflows.evidence import HostsOrder, Inventory, Mark

LIMIT = 100


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def order(home: Path, request: pytest.FixtureRequest) -> Iterator[HostsOrder]:
    made = order_for(home, f"i-{os.getpid()}-{abs(hash(request.node.name)) % 10**10:010d}")
    yield made
    hosts = provider(home)
    for claim in reversed(hosts.claims(made)):
        hosts.release(claim, made, say)
    assert mine(made.identity.run_key) == []


def directory_of(home: Path, order: HostsOrder) -> Path:
    return home / "home/hosts" / order.identity.run_key


def marked(found: Inventory) -> list[str]:
    return [mark.hosts.identity.run_key for mark in found.marked]


def half_made(home: Path, order: HostsOrder) -> Path:
    """A launch that ended before it started anything."""
    with pytest.raises(Refused):
        provider(home).launch(order, no, say)
    return directory_of(home, order)


def test_where_nothing_ever_was_there_is_nothing(home: Path) -> None:
    assert provider(home).inventory(LIMIT) == Inventory()


def test_hosts_are_found_from_their_launch_to_their_release_and_not_after(home: Path, order: HostsOrder) -> None:
    hosts = provider(home)
    hosts.launch(order, yes, say)
    found = hosts.inventory(LIMIT)
    assert found == Inventory(marked=(Mark(context=hosts.context(order), hosts=order),))
    prove(hosts, order)
    assert hosts.inventory(LIMIT) == found
    service = hosts.claims(order)[1]
    assert hosts.release(service, order, say).ok
    assert hosts.inventory(LIMIT) == found  # half released: its directories and files are still there
    release(hosts, order)
    assert hosts.inventory(LIMIT) == Inventory()
    assert (directory_of(home, order) / "mark.json").exists()


def test_the_mark_is_private_and_is_all_that_releasing_takes(home: Path, order: HostsOrder) -> None:
    provider(home).launch(order, yes, say)
    path = directory_of(home, order) / "mark.json"
    assert path.stat().st_mode & 0o777 == 0o600
    [mark] = provider(home).inventory(LIMIT).marked
    release(provider(home), mark.hosts)
    assert mine(order.identity.run_key) == []


def test_the_mark_is_written_before_anything_else_in_the_directory(
    home: Path, order: HostsOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that dies right after it: an adopting launch, or the reaper, knows whose it is."""

    class Died(BaseException):
        pass

    def die(*told: Any) -> Any:
        raise Died

    monkeypatch.setattr("activities.hosts.local.locked", die)
    with pytest.raises(Died):
        provider(home).launch(order, yes, say)
    assert [each.name for each in directory_of(home, order).iterdir()] == ["mark.json"]
    assert marked(provider(home).inventory(LIMIT)) == [order.identity.run_key]


def test_half_made_hosts_and_hosts_whose_services_were_killed_are_found(home: Path, order: HostsOrder) -> None:
    half_made(home, order)
    hosts = provider(home)
    assert marked(hosts.inventory(LIMIT)) == [order.identity.run_key]
    hosts.launch(order, yes, say)
    prove(hosts, order)
    for state in services(home, order):
        os.kill(state["pid"], signal.SIGKILL)
    assert marked(hosts.inventory(LIMIT)) == [order.identity.run_key]


def test_a_process_that_outlived_a_release_is_found(home: Path, order: HostsOrder) -> None:
    hosts = provider(home)
    half_made(home, order)
    release(hosts, order)
    assert hosts.inventory(LIMIT) == Inventory()
    late = subprocess.Popen(["sleep", "60"], env={**os.environ, "LANYARD_CUSTODY": order.identity.run_key})
    try:
        assert marked(hosts.inventory(LIMIT)) == [order.identity.run_key]
    finally:
        late.kill()
        late.wait()
    assert hosts.inventory(LIMIT) == Inventory()


def test_a_release_of_what_never_was_leaves_nothing_to_find(home: Path, order: HostsOrder) -> None:
    hosts = provider(home)
    release(hosts, order)
    assert hosts.inventory(LIMIT) == Inventory()


# Lookalikes ----------------------------------------------------------------------------------------------------------


def test_two_deployments_and_namespaces_on_one_home_are_told_apart(home: Path, order: HostsOrder) -> None:
    key = order.identity.run_key
    others = [
        order_for(home, f"{key}-{number}") for number in range(3)
    ]  # one prefix: a name is never what tells whose it is
    changes = ({"deployment": "tests-2"}, {"namespace": "another"}, {"deployment": "test"})
    for other, change in zip(others, changes, strict=True):
        half_made(home, other.model_copy(update={"identity": other.identity.model_copy(update=change)}))
    half_made(home, order)
    found = provider(home).inventory(LIMIT)
    told = {
        mark.hosts.identity.run_key: (mark.hosts.identity.deployment, mark.hosts.identity.namespace)
        for mark in found.marked
    }
    assert told == {
        key: ("tests", ""),
        f"{key}-0": ("tests-2", ""),
        f"{key}-1": ("tests", "another"),
        f"{key}-2": ("test", ""),
    }


def test_without_a_mark_nothing_is_guessed_from_a_name(home: Path, order: HostsOrder) -> None:
    directory = half_made(home, order)
    (directory / "mark.json").unlink()
    found = provider(home).inventory(LIMIT)
    assert found == Inventory(unmarked=(str(directory),))


def spoil(directory: Path, how: str) -> None:
    path = directory / "mark.json"
    told = json.loads(path.read_bytes())
    if how == "half":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "another run's":
        told["hosts"]["identity"]["run_key"] += "x"
    elif how == "another custody's":
        told["hosts"]["identity"]["custody_id"] += "x"
    elif how == "of a later version":
        told["schema_version"] = 2
    elif how == "without a deployment":
        del told["hosts"]["identity"]["deployment"]
    elif how == "readable by others":
        path.chmod(0o644)
    elif how == "a link":
        path.rename(directory / "elsewhere.json")
        path.symlink_to(directory / "elsewhere.json")
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "in an open directory":
        directory.chmod(0o755)
    if how not in ("half", "readable by others", "a link", "a directory"):
        path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "how",
    [
        "half",
        "another run's",
        "another custody's",
        "of a later version",
        "without a deployment",
        "readable by others",
        "a link",
        "a directory",
        "in an open directory",
    ],
)
def test_a_mark_that_cannot_be_believed_is_unreadable_and_not_absent(home: Path, order: HostsOrder, how: str) -> None:
    directory = half_made(home, order)
    spoil(directory, how)
    found = provider(home).inventory(LIMIT)
    assert (found.marked, found.unmarked) == ((), ())
    [told] = found.unreadable
    assert str(directory) in told
    directory.chmod(0o700)
    shutil.rmtree(directory)


def test_a_copy_of_a_run_s_directory_is_not_the_run(home: Path, order: HostsOrder) -> None:
    directory = half_made(home, order)
    copy = directory.with_name(directory.name + ".bak")
    shutil.copytree(directory, copy)
    copy.chmod(0o700)
    found = provider(home).inventory(LIMIT)
    assert marked(found) == [order.identity.run_key]
    assert [str(copy) in each for each in found.unreadable] == [True]


def test_a_copied_home_says_that_it_was_made_elsewhere(home: Path, order: HostsOrder) -> None:
    half_made(home, order)
    shutil.copytree(home / "home", home / "copy")
    copied = LocalHosts(home / "copy", b"a secret")
    [mark] = copied.inventory(LIMIT).marked
    assert mark.context == provider(home).context(order) != copied.context(order)


def test_somebody_else_s_processes_and_files_are_neither_listed_nor_touched(home: Path, order: HostsOrder) -> None:
    directory = half_made(home, order)
    (home / "home/hosts/notes.txt").write_text("mine")
    strangers = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)", order.identity.run_key],
            cwd=directory,
            env={**os.environ, "LANYARD_CUSTODY": order.identity.run_key + suffix},
        )
        for suffix in ("x", "-hosts")
    ]
    try:
        found = provider(home).inventory(LIMIT)
        assert marked(found) == [order.identity.run_key]
        assert len(found.unreadable) == 1  # the file: not a directory
        release(provider(home), found.marked[0].hosts)
        assert provider(home).inventory(LIMIT).marked == ()
        assert [each.poll() for each in strangers] == [None, None]
    finally:
        for each in strangers:
            each.kill()
            each.wait()


def test_a_process_that_hides_makes_released_runs_unknown_and_is_told_once(
    home: Path, order: HostsOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = provider(home)
    others = [order, *(order_for(home, f"{order.identity.run_key}-{number}") for number in range(3))]
    for each in others:
        half_made(home, each)
        release(hosts, each)
    hidden = subprocess.Popen(["sleep", "60"])
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if str(path) == f"/proc/{hidden.pid}/environ":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    try:
        found = hosts.inventory(LIMIT)
        assert found.marked == ()
        [told] = found.unreadable
        assert f"process {hidden.pid} cannot be looked at" in told
    finally:
        monkeypatch.undo()
        hidden.kill()
        hidden.wait()


def test_what_one_look_brings_is_bounded_and_says_what_it_left_out(home: Path, order: HostsOrder) -> None:
    for number in range(5):
        half_made(home, order_for(home, f"{order.identity.run_key}-{number}"))
    found = provider(home).inventory(3)
    assert len(found.marked) == 3
    assert found.left_out == 2
