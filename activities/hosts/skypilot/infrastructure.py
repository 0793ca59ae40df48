"""What the infrastructure itself says of a run's hosts: SkyPilot's table is no proof of anything.

Slurm is asked on its login node, with the same ssh entry that SkyPilot uses (`.slurm/config` in SkyPilot's home) and
nothing else of SkyPilot's, so this works with its API server dead. A job is a run's when its name is the cluster's
(with the user's hash that SkyPilot adds) *and* its comment is exactly the run's mark. The name alone proves nothing.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from activities.hosts import AbsenceUnknown
from activities.hosts.skypilot import task
from trainer.processes import dies_with_parent
from workflows.evidence import HostsOrder

ASK_S: Final = 40.0
LONGEST_ANSWER: Final = 16 * 2**20
SEPARATOR: Final = "\x1f"
COLUMNS: Final = "%i", "%T", "%j", "%R", "%k"
OVER: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", "REVOKED"),
    }
)
"""States of Slurm in which a job holds nothing. COMPLETING is none of them."""
LOOKS_LIKE_OURS: Final = re.compile(r"ly-[a-z0-9-]*[0-9a-f]{10}-[A-Za-z0-9-]+")

TASK: Final = re.compile(r"sky-\d+")
"""The name of the step in which SkyPilot runs a task of its queue."""

Run = Callable[[Sequence[str]], str]
"""Runs a command where Slurm is asked; returns what it printed. Raises AbsenceUnknown."""


@dataclass(frozen=True)
class SlurmJob:
    id: str
    state: str
    name: str
    why: str
    """Slurm's reason where it waits or failed, its nodes where it runs."""
    comment: str

    @property
    def over(self) -> bool:
        return self.state in OVER

    def __str__(self) -> str:
        return f"Slurm job {self.id} ({self.name}) {self.state}"


@dataclass(frozen=True)
class Found:
    """The jobs that have the name of one run's cluster."""

    ours: tuple[SlurmJob, ...]
    """With exactly the run's mark."""
    unmarked: tuple[SlurmJob, ...]
    foreign: tuple[SlurmJob, ...]
    """With another mark: never touched."""

    @property
    def live(self) -> list[SlurmJob]:
        return [each for each in self.ours if not each.over]


class Slurm:
    """One Slurm cluster, as the user sees it whose jobs SkyPilot starts there."""

    def __init__(self, cluster: str, run: Run) -> None:
        self.cluster = cluster
        self._run = run

    def jobs(self) -> list[SlurmJob]:
        """Every job of this user that Slurm still knows, ended ones for some minutes too. Raises AbsenceUnknown."""
        return parse(self._run(["squeue", "--me", "--noheader", "--states=all", f"--format={SEPARATOR.join(COLUMNS)}"]))

    def of(self, order: HostsOrder) -> Found:
        """The jobs that have the run's name. Raises AbsenceUnknown."""
        return sort(self.jobs(), order)

    def tasks(self, job: SlurmJob) -> list[str]:
        """Ids of this job's steps that run a task of SkyPilot's queue. Raises AbsenceUnknown."""
        told = self._run(["squeue", "--steps", "--me", "--noheader", f"--format=%i{SEPARATOR}%j"])
        steps = [line.split(SEPARATOR) for line in told.split("\n") if line]
        if any(len(each) != 2 for each in steps):
            raise AbsenceUnknown(f"squeue said what cannot be read: {told[:200]!r}")
        return [step for step, name in steps if step.startswith(f"{job.id}.") and TASK.fullmatch(name)]

    def cancel_task(self, step: str) -> None:
        """End one step, at once: Slurm sends its processes SIGKILL and nothing before it (measured)."""
        self._run(["scancel", step])

    def cancel(self, job: SlurmJob) -> None:
        """End exactly this job: its id, and the name that it had when it was looked at."""
        self._run(["scancel", f"--name={job.name}", job.id])


def parse(text: str) -> list[SlurmJob]:
    """squeue's lines. Raises AbsenceUnknown for one that cannot be read: it may be anybody's."""
    found = []
    for line in filter(None, text.split("\n")):
        fields = line.split(SEPARATOR)
        if len(fields) != len(COLUMNS) or not re.fullmatch(r"[0-9][0-9_+\[\]%,-]*", fields[0]):
            raise AbsenceUnknown(f"squeue said what cannot be read: {line[:200]!r}")
        number, state, name, why, comment = fields
        found.append(SlurmJob(number, state, name, why, "" if comment == "(null)" else comment))
    return found


def sort(jobs: Sequence[SlurmJob], order: HostsOrder) -> Found:
    """Whose are the jobs that have this run's name?"""
    identity = order.identity
    name = re.compile(re.escape(task.cluster_name(identity.run_key)) + r"-[A-Za-z0-9][A-Za-z0-9-]*")
    named = [each for each in jobs if name.fullmatch(each.name)]
    mark = task.mark_text(identity)
    return Found(
        ours=tuple(each for each in named if each.comment == mark),
        unmarked=tuple(each for each in named if not each.comment),
        foreign=tuple(each for each in named if each.comment and each.comment != mark),
    )


def slurm_of(infra: str) -> str | None:
    """The Slurm cluster that `hosts.infra` names, None for another kind of infrastructure."""
    kind, _, rest = infra.partition("/")
    return rest.partition("/")[0] or None if kind == "slurm" else None


def known_slurms(home: Path) -> list[str]:
    """The Slurm clusters that SkyPilot knows in this home. Raises AbsenceUnknown."""
    try:
        text = (home / ".slurm" / "config").read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise AbsenceUnknown(f"{home / '.slurm' / 'config'} cannot be read: {error}") from error
    names = [name for line in re.findall(r"(?im)^\s*host\s+(.+)$", text) for name in line.split()]
    return sorted({each for each in names if not set(each) & set("*?!")})


def login_node(cluster: str, home: Path, environment: Mapping[str, str]) -> Run:
    """Runs on the login node of a Slurm cluster, by ssh. A changed host key is refused."""

    def run(command: Sequence[str]) -> str:
        ssh = [
            shutil.which("ssh") or "/usr/bin/ssh",
            *("-F", str(home / ".slurm" / "config"), "-T"),
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no", "-o", "ControlPath=none"),
            *("-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={home / '.slurm' / 'known_hosts'}"),
            *(cluster, shlex.join(command)),
        ]
        try:
            answer = subprocess.run(
                [*dies_with_parent(), *ssh],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AbsenceUnknown(f"the login node of slurm/{cluster} does not answer: {error}") from error
        if answer.returncode != 0:
            said = answer.stderr.decode(errors="replace").strip().splitlines()
            raise AbsenceUnknown(
                f"`{command[0]}` on the login node of slurm/{cluster} failed ({answer.returncode}): "
                f"{' / '.join(said[-3:])[-400:]}"
            )
        if len(answer.stdout) > LONGEST_ANSWER:
            raise AbsenceUnknown(f"`{command[0]}` on slurm/{cluster} said more than {LONGEST_ANSWER} bytes")
        return answer.stdout.decode(errors="replace")

    return run
