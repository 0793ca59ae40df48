"""One full run with a drill, started, watched and judged as its user would, on the real parts.

Several tests look at the same run (about two minutes on two cores), so that each says what it proves.
"""

from __future__ import annotations

import html.parser
import re
import stat
import time

import pytest

from tests.integration.canary import Canaries, files
from tests.integration.census import Census
from tests.integration.full_run import Carried
from tests.integration.runs import DRILL_AFTER, STEPS
from tests.integration.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]


def test_it_completes_with_outcome_and_cleanup_told_apart(full: Carried) -> None:
    """Completed; succeeded and clean; artifacts verified after teardown; what was not proved is said."""
    verdict = full.verdict
    assert (verdict["outcome"], verdict["cleanup"]) == ("succeeded", "clean"), verdict["message"]
    assert verdict["artifacts"]["ok"]
    assert len(verdict["artifacts"]["checks"]) > 5
    assert all(each["ok"] for each in verdict["artifacts"]["checks"])
    assert verdict["commits"][-1]["step"] == STEPS
    assert any(each.startswith("multi-node") for each in verdict["not_proved"])
    assert verdict["placement"]["distinct_nodes"] == 2
    assert verdict["placement"]["distinct_hosts"] == 1
    release = full.last_word
    assert release["cleanup"] == "clean"
    assert release["remaining"] == []
    assert {each["kind"] for each in release["claims"]} == {"cluster", "service", "job"}
    assert sum(each["kind"] == "job" for each in release["claims"]) == 2  # the training, and the drill's helper
    assert [each for each in release["steps"] if not each["ok"]] == []
    assert sum("proof of absence" in each["action"] for each in release["steps"]) == 2
    assert full.left.document("release.json") == release


def test_nothing_is_left_at_the_moment_custody_closes(full: Carried, census: Census) -> None:
    """No process, port, file, open workflow or unfinished upload, at once; and the census had seen the hosts live."""
    assert full.right_after.processes == ()
    assert full.right_after.ports == ()
    assert full.right_after.entries == ()
    assert full.right_after.uploads == ()
    assert census.settled(20).lines() == []  # what the list of workflows shows follows within seconds
    seen = census.seen_processes().values()
    for program in ("raylet", "gcs_server", "trainer.hosting", "trainer.application", "RayTrainWorker"):
        assert any(program in each for each in seen), f"the census never saw {program}"


def test_the_drill_is_proved_and_the_evidence_in_storage_says_the_same(full: Carried) -> None:
    """One rank was killed after the commit, both went on at the next step from equal state; no step was made twice."""
    drill, victim = full.verdict["drill"], full.verdict["victim"]
    assert drill["proved"], drill["problems"]
    assert full.verdict["strike"]["outcome"] == "killed"
    assert victim["commit"]["step"] == DRILL_AFTER
    assert (drill["committed_step"], drill["resumed_step"]) == (DRILL_AFTER, DRILL_AFTER + 1)

    left = full.left
    before, after = left.evidence(1, "start"), left.evidence(2, "start")
    assert [each["restored_step"] for each in before] == [0, 0]
    assert [each["restored_step"] for each in after] == [DRILL_AFTER, DRILL_AFTER]
    assert [each["step"] for each in left.evidence(2, "first-step")] == [DRILL_AFTER + 1, DRILL_AFTER + 1]
    for what in ("model_sha256", "momentum_sha256"):
        assert len({each[what] for each in after}) == 1
        assert after[0][what] != before[0][what]
    killed = next(each for each in before if each["rank"] == victim["rank"])
    assert (killed["process"]["pid"], killed["process"]["start_time"]) == (victim["pid"], victim["start_time"])
    assert len({each["ray"]["node_id"] for each in after}) == 2

    metrics = left.exported("metrics.json")
    assert [each["step"] for each in metrics["steps"]] == list(range(1, STEPS + 1))
    assert [each["attempt"] for each in metrics["steps"]] == [1] * DRILL_AFTER + [2] * (STEPS - DRILL_AFTER)
    assert metrics["steps"][-1]["loss"] < metrics["steps"][0]["loss"]
    assert left.checksums_hold()
    assert left.committed_steps()[-1] == STEPS


def test_histories_stay_small(full: Carried, stack: Stack) -> None:
    """At most 250 events in the run's history and 150 in custody's, counted from `temporal workflow show`."""
    run, custody = stack.events(full.run), stack.events(full.custody)
    assert len(run) <= 250
    assert len(custody) <= 150
    print(f"events: run {len(run)}, custody {len(custody)}")
    for events in (run, custody):
        assert not any(each["eventType"] == "EVENT_TYPE_WORKFLOW_TASK_FAILED" for each in events)
    scheduled = [each for each in run if each["eventType"] == "EVENT_TYPE_ACTIVITY_TASK_SCHEDULED"]
    assert all(each.get("userMetadata", {}).get("summary") for each in scheduled)


def test_the_list_view_and_the_queries_tell_of_it_after_it_closed(full: Carried, stack: Stack) -> None:
    """Search attributes by `temporal workflow list --query`; the three queries; custody's own two."""
    wanted = f"LanyardRunKey = '{full.left.key}' AND LanyardOutcome = 'succeeded' AND LanyardCleanup = 'clean'"
    ends = time.monotonic() + 60
    while not (listed := stack.asked("workflow", "list", "--query", wanted)):
        assert time.monotonic() < ends, "the search attributes are not visible"
        time.sleep(0.5)
    assert [each["execution"]["workflowId"] for each in listed] == [full.run.workflow_id]
    by_step = f"LanyardStep = '{STEPS}/{STEPS}' AND LanyardPhase = 'report' AND LanyardProvider = 'local'"
    assert stack.asked("workflow", "list", "--query", f"{by_step} AND LanyardRunKey = '{full.left.key}'")

    progress = stack.query(full.run, "progress")
    assert (progress["step"], progress["steps"], progress["storage"]) == (STEPS, STEPS, full.left.uri)
    assert not stack.query(full.run, "claims")["owned"]
    told = stack.query(full.run, "verdict")
    assert (told["outcome"], told["cleanup"], told["run_key"]) == ("succeeded", "clean", full.left.key)
    assert stack.query(full.custody, "state")["state"] == "clean"
    assert len(stack.query(full.custody, "claims")) == 4


def test_the_report_is_complete_and_needs_no_network(full: Carried) -> None:
    """report.json says what the verdict says; report.html parses, shows the run and asks nobody for anything."""
    report = full.left.document("report.json")
    for name in ("outcome", "cleanup", "message", "run_key", "drill", "victim", "strike", "commits", "not_proved"):
        assert report[name] == full.verdict[name], name
    page = full.left.raw("report.html").decode()
    told = Page(page)
    assert told.asked_for == []
    assert told.tags >= {"html", "body", "table", "svg"}
    for shown in (full.left.key, "succeeded", "clean", *full.verdict["not_proved"]):
        assert shown in told.text, shown


class Page(html.parser.HTMLParser):
    """What a page shows, and every address that a browser would fetch for it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.asked_for: list[str] = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]+)", page)
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        fetched = {"src", "srcset", "data", "poster"} | ({"href"} if tag in ("link", "use", "image") else set())
        self.asked_for += [
            value for name, value in attrs if name in fetched and value and not value.startswith(("data:", "#"))
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_second_start_under_the_same_id_joins_or_is_refused(full: Carried, stack: Stack) -> None:
    """While a run goes on, the CLI answers a second start with the run that is there, or with --fail-existing refuses
    it: there was one run, one custody and one job under that id."""
    assert full.second_start == full.run
    status, said = full.third_start
    assert status != 0
    assert "already" in said
    listed = stack.asked("workflow", "list", "--query", f"WorkflowId = '{full.run.workflow_id}'")
    assert [each["execution"]["runId"] for each in listed] == [full.run.run_id]
    assert not [name for name in stack.names("runs/") if "another-run" in name]


def test_no_secret_is_written_anywhere(full: Carried, stack: Stack, census: Census) -> None:
    """Credentials, deployment secret and the run's token are in none of: Temporal's database, objects, job metadata,
    process arguments, Ray's own directories, logs and other files, the reports. In the files that must hold them they
    are private. The search itself is proved by what it must find."""
    canaries = full.canaries
    private = [stack.home / "secret", stack.home / "env", stack.home / "s3" / "credentials.json"]
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert canaries.search([(str(path), path.read_bytes())]), f"{path} holds none: the search finds nothing"
    everything = list(files(stack.home, private))
    database = [each for each in everything if "/temporal/temporal.db" in each[0]]
    logs = [each for each in everything if each[0].endswith(".log")]
    names = stack.names("")
    objects = [(name, stack.get(name)) for name in names]
    arguments = [("the arguments of processes", b"\n".join(census.commands))]

    found = canaries.search([*everything, *objects, *arguments, ("job metadata", full.jobs)])
    assert found == []
    assert full.on_hosts == []

    # What is no secret is found in each of these places, so they were looked at, in a form that can be read.
    known = Canaries({"run key": full.left.key})
    for what, places in {"database": database, "logs": logs, "objects": objects, "arguments": arguments}.items():
        assert known.search(places), f"the run's own key is not found in {what}"
    assert known.search([("job metadata", full.jobs)])
    assert full.hosts_files > 50
