"""Guarded runs on two hosts of a real Slurm, started as a user starts them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hosts.conftest import NAMESPACE
from tests.hosts.site import INFRA, Site
from tests.integration.runs import DRILL_AFTER, left_by, regression
from tests.integration.stack import Stack, Started

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]

HOSTS = {
    "provider": "skypilot",
    "count": 2,
    "infra": INFRA,
    "device": "cpu",
    "cpus": "2",
    "memory": "4",
    "require_distinct_hosts": False,
    "require_distinct_devices": False,
}


def phases(verdict: dict[str, Any]) -> None:
    for each in verdict["phases"]:
        print(f"{each['name']:>12} {each['ended'] - each['started']:7.1f} s  {each['note'][:100]}", flush=True)


def nothing_is_left(site: Site, stack: Stack, run: Started) -> None:
    assert site.queue() == []
    assert site.wait_until_clean(30) == {}
    assert site.shared() == []
    kept = stack.home / "skypilot-runs"
    assert [each.name for each in kept.iterdir() if each.name != "known_hosts"] == []


def test_a_full_run_with_a_drill_is_verified_after_its_hosts_are_gone(site: Site, stack: Stack) -> None:
    drill = {"kind": "worker", "after_step": DRILL_AFTER}
    run = stack.train("slurm", regression("slurm", hosts=HOSTS, drill=drill), NAMESPACE)
    stack.wait(run, 300)
    verdict = stack.result(run)
    phases(verdict)
    assert (verdict["outcome"], verdict["cleanup"]) == ("succeeded", "clean"), verdict["message"]
    assert verdict["drill"]["proved"]
    assert verdict["artifacts"]["ok"]
    assert {each["address"] for each in verdict["hosts"]["hosts"]} == {f"{site.subnet}.2", f"{site.subnet}.3"}
    release = stack.last_word(run)
    for each in release["steps"]:
        print(f"{each['seconds']:7.1f} s  {each['action']} {each['claim']}: {each['detail']}", flush=True)
    assert [each["kind"] for each in release["claims"]] == ["cluster", "service", "job", "job"]
    assert [each for each in release["steps"] if not each["ok"]] == []
    nothing_is_left(site, stack, run)
    assert left_by(stack, run).checksums_hold()


def test_a_run_that_is_terminated_in_training_leaves_nothing(site: Site, stack: Stack) -> None:
    run = stack.train("slurm-ended", regression("slurm-ended", hosts=HOSTS), NAMESPACE)
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 300)
    custody = stack.custody(run)
    stack.cli("workflow", "terminate", *stack.at(run), "--reason", "the test says so")
    stack.wait(custody, 120)
    release = stack.result(custody)
    for each in release["steps"]:
        print(f"{each['seconds']:7.1f} s  {each['action']} {each['claim']}: {each['detail']}", flush=True)
    assert (release["cleanup"], release["remaining"]) == ("clean", [])
    assert [each for each in release["steps"] if not each["ok"]] == []
    assert left_by(stack, run).document("report.json")["outcome"] == "terminated"
    nothing_is_left(site, stack, run)
