"""What crosses a boundary: orders given to activities, and the facts they bring back.

Every model is frozen and carries no secret. Times are POSIX seconds (float, UTC) unless a name ends in `_s` (a
duration in seconds).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from workflows.spec import RunSpec


class Frozen(BaseModel):
    """A value that crosses a boundary: immutable, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(Frozen):
    """Who a run is. Everything a run creates is named from `run_key` (see `workflows.names`)."""

    workflow_id: str
    run_id: str
    original_run_id: str
    run_key: str
    custody_id: str
    deployment: str
    namespace: str = ""
    """Temporal's. Empty in what was recorded before it was part of the mark."""
    storage: str
    """The run's own root: `<storage.uri>/<run_key>`."""


ClaimKind = Literal["cluster", "service", "job"]


class Claim(Frozen):
    """The identity of one outside resource, written down in custody before it is touched."""

    kind: ClaimKind
    name: str
    """The exact id at the provider: cluster name, service task id, job submission id."""
    provider: str
    context: str
    """Where the name means something (machine and user, kube context, endpoint). Compared again at release."""
    run_id: str
    """The exact run that asks. Custody guards one run and refuses the claims of any other (a reset run's)."""
    holder: str
    """The worker that made it (for people; nothing is decided on it)."""
    attempt: str = ""
    """Which attempt of which activity asked. Each has a send window of its own."""
    send_window_s: float
    """The claimant sends nothing later than this after it asked for the claim."""
    longest_request_s: float
    """The longest the provider may take to act on a request it has already received."""
    price_per_hour: float = 0.0
    """US dollars, of everything that is claimed here, from the claim on."""
    may_appear_until: float = 0.0
    """Set by custody on its own clock: a proof of absence before this is not final."""

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"


class Deployment(Frozen):
    """What the first activity found out about the place the run is operated from; recorded once in history."""

    deployment: str
    search_attributes: tuple[str, ...]
    secret_fingerprint: str
    application_source: str
    """SHA-256 of the trainer source that this run delivers."""


class HostsOrder(Frozen):
    """Which hosts a run needs. The same order is given to launch, prove, release and the proof of absence."""

    identity: Identity
    provider: str
    count: int
    device: Literal["cpu", "cuda"]
    options: dict[str, Any] = Field(default_factory=dict)
    """The provider's own part of `hosts` in run.json."""
    lease_s: float
    not_after_s: float
    """Hard end of every hosting service, counted from its start."""
    price_per_hour: float = 0.0
    """US dollars, of all hosts together, as preflight found it."""


class Mark(Frozen):
    """What everything that a provider creates carries: whose it is, and the order by which it is released."""

    schema_version: Literal[1] = 1
    context: str
    """Where it was created, as in its claims."""
    hosts: HostsOrder


class Inventory(Frozen):
    """Everything a provider has now, what is half-made or half-released included. What was released whole is not in
    it."""

    marked: tuple[Mark, ...] = ()
    unmarked: tuple[str, ...] = ()
    """What carries no mark, by name: nobody's, as far as can be told."""
    unreadable: tuple[str, ...] = ()
    """What cannot be told, and why. Unknown is not absent."""
    left_out: int = 0
    """How many more there are than were asked for."""


class HostFacts(Frozen):
    """One host, as it described itself in its preparation receipt."""

    index: int
    role: Literal["head", "worker"]
    address: str
    node_id: str
    host_fingerprint: str
    hostname: str
    versions: dict[str, str]
    environment: str


class Hosts(Frozen):
    """Hosts that are all up and have each proved themselves."""

    provider: str
    context: str
    cluster: str
    hosts: tuple[HostFacts, ...]


class JobOrder(Frozen):
    """One native Ray Job. `order` is the non-secret JSON that the application reads from LANYARD_JOB."""

    identity: Identity
    hosts: HostsOrder
    submission_id: str
    train_name: str
    entrypoint: str
    working_dir: str | None = None
    order: dict[str, Any]


class PreflightOrder(Frozen):
    """Try everything that can fail before anything is paid for."""

    identity: Identity
    spec: RunSpec
    hosts: HostsOrder
    deployment: Deployment
    """As the first activity recorded it: another worker must be of the same deployment, with the same secret."""


class ResumePoint(Frozen):
    """The commit of an earlier run from which this one starts; it was loaded before it was named."""

    source: str
    checkpoint: str
    step: int | None
    """None where neither a script's checkpoint nor its report says."""


class Cleared(Frozen):
    """What preflight found."""

    conditional_writes: bool
    """Whether the storage honours If-None-Match; where it does not, a lost race is found by reading back."""
    price_per_hour: float
    plan: str
    resume: ResumePoint | None = None


class SubmittedJob(Frozen):
    submission_id: str
    adopted: bool
    """True when the submission id existed already (a lost answer), and was adopted."""


class Commit(Frozen):
    """A checkpoint that Ray Train itself reports COMMITTED."""

    checkpoint: str
    """Directory name, `checkpoint_…`."""
    step: int
    loss: float | None = None
    index: int
    """Ray's report index at that commit."""
    model_sha256: str | None = None
    momentum_sha256: str | None = None
    """Of the state committed, as the report told them; None where it did not."""


WatchEnd = Literal["milestone", "finished", "failed", "stalled", "lost"]


class WatchOrder(Frozen):
    """Watch one job until something the run must decide on."""

    job: JobOrder
    steps: int
    stall_s: float
    milestones: tuple[int, ...]
    """Committed steps at which the watch returns, ascending."""
    seen: Commit | None = None


class WatchResult(Frozen):
    end: WatchEnd
    commit: Commit | None
    """The last commit seen."""
    job_status: str
    message: str = ""
    diagnosis: str = ""
    at: float


class Victim(Frozen):
    """The one training worker to kill: chosen once, recorded, then struck exactly."""

    rank: int
    node_id: str
    address: str
    attempt: int
    pid: int
    start_time: int
    """Clock ticks since boot: /proc/<pid>/stat, field 22."""
    boot_id: str
    commit: Commit


class DrillOrder(Frozen):
    """Choose a victim of this job after `commit`; with `victim`, strike exactly that."""

    job: JobOrder
    commit: Commit
    victim: Victim | None = None


class Strike(Frozen):
    outcome: Literal["killed", "already_gone"]
    at: float
    """When the signal was sent, on the struck host's clock."""
    helper: str


class ProofOrder(Frozen):
    """Prove from evidence in storage where ranks ran and, after a drill, that training resumed exactly."""

    identity: Identity
    world_size: int
    victim: Victim | None
    strike: Strike | None
    parity: bool


class Recovery(Frozen):
    """The proof of a drill, from evidence alone."""

    proved: bool
    problems: tuple[str, ...]
    committed_step: int
    resumed_step: int | None
    first_steps: dict[str, int]
    attempts: int
    seconds_to_resume: float | None
    model_sha256: str | None
    momentum_sha256: str | None
    parity: Literal["equal", "different", "not_asked"] = "not_asked"


class Placement(Frozen):
    """Where every rank really ran, by its own evidence."""

    ranks: tuple[dict[str, Any], ...]
    distinct_hosts: int
    distinct_nodes: int
    distinct_devices: int


class Proof(Frozen):
    placement: Placement
    recovery: Recovery | None


class RecordsOrder(Frozen):
    """Save the logs and the native status of these jobs, before their hosts go."""

    hosts: HostsOrder
    submissions: tuple[str, ...]


class VerifyOrder(Frozen):
    """Verify the artifacts again, from storage alone."""

    identity: Identity
    submission_id: str
    distinct_hosts: bool
    distinct_devices: bool
    expect: dict[str, Any]
    """The job's order: what the run must have been, and so which checks apply."""


class Check(Frozen):
    name: str
    ok: bool
    detail: str


class NotApplicable(Frozen):
    """A check that had no object in this run, and so proved nothing."""

    name: str
    why: str


class Artifacts(Frozen):
    """What verification after teardown found, from storage alone."""

    ok: bool
    submission_id: str
    checks: tuple[Check, ...]
    not_applicable: tuple[NotApplicable, ...] = ()
    figures: dict[str, Any]


class StepTaken(Frozen):
    """One step of a release: what was tried on which claim, and how it went."""

    claim: str
    action: str
    ok: bool
    detail: str
    seconds: float


class Release(Frozen):
    """Custody's word on cleanup. `clean` only when absence was proved twice for every claim."""

    run_key: str
    cleanup: Literal["clean", "releasing", "unproved"]
    reason: str
    claims: tuple[Claim, ...]
    steps: tuple[StepTaken, ...]
    remaining: tuple[str, ...]
    began: float
    ended: float | None
    last_commit: Commit | None = None
    """The newest commit in storage after the release, when nothing can commit any more."""


class CustodyOrder(Frozen):
    """What custody guards. A run's starts with nothing claimed."""

    identity: Identity
    hosts: HostsOrder
    deadline: float
    """Absolute; `extend` moves it. Release begins then at the latest, also when the run is stuck."""
    budget: float | None = None
    """US dollars that claimed hosts may cost; then the run is aborted. None: no limit."""
    search_attributes: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    """What is held to begin with: an orphan's, handed over by the reaper."""
    due: str = ""
    """Why release begins at once; empty where it does not."""


class KeepOrder(Frozen):
    """Watch one exact run until it closes; while `renew`, keep its lease alive."""

    identity: Identity
    lease_s: float
    renew: bool


RunStatus = Literal["completed", "failed", "canceled", "terminated", "timed_out", "continued_as_new", "gone"]


class RunClosed(Frozen):
    status: RunStatus


class ReleaseOrder(Frozen):
    """Release these claims, last first, and prove each absent twice."""

    identity: Identity
    hosts: HostsOrder
    claims: tuple[Claim, ...]
    reason: str
    began: float


class UnspokenOrder(Frozen):
    """Write the report of a run that could not: it was terminated, or its execution timed out."""

    identity: Identity
    hosts: HostsOrder
    status: Literal["terminated", "timed_out"]
    release: Release


class ReaperOrder(Frozen):
    """Find what nobody guards any more. The same order is given to the reaper and to each of its sweeps."""

    deployment: str
    """Whose marks count. A worker of another deployment refuses the order."""


class Suspect(Frozen):
    """Something of this deployment whose custody is not open, in one look."""

    hosts: HostsOrder
    claims: tuple[Claim, ...]
    """What is to be released, last first."""
    custody: str
    """`absent`, or how it closed."""
    custody_run_id: str = ""
    """Which execution of custody closed."""
    lease: str = ""
    """A fingerprint of its lease. While that changes, somebody renews it."""


class Sweep(Frozen):
    """One look: inventory first, then the custody of each thing that carries this deployment's mark."""

    found: int
    """Things with this deployment's mark, made here."""
    held: int
    """Of these, with an open custody."""
    suspects: tuple[Suspect, ...]
    foreign: int
    """Things with another's mark, or none: never touched."""
    unreadable: int
    left_out: int
    """Beyond the bounds of one look: for the next."""
    notes: tuple[str, ...]
    """The first few of what is foreign or unreadable, a line each."""
    search_attributes: tuple[str, ...]
    """Which of ours the namespace knows, for the custody that is started."""


class Orphan(Frozen):
    """Something whose custody was not open on two looks."""

    custody_id: str
    custody: str
    """As in `Suspect`."""
    handed_over: bool
    """Whether custody was started for it; False where somebody else's start came first."""


class Reaped(Frozen):
    """What the reaper found, and what it did."""

    found: int
    held: int
    suspects: int
    """Without an open custody at the first look."""
    orphans: tuple[Orphan, ...]
    foreign: int
    unreadable: int
    left_out: int
    notes: tuple[str, ...]


class Phase(Frozen):
    name: str
    started: float
    ended: float | None = None
    note: str = ""


Outcome = Literal["succeeded", "failed", "rejected", "aborted", "cancelled", "terminated", "timed_out"]


class Verdict(Frozen):
    """The result of a run. `outcome` and `cleanup` never overwrite each other."""

    schema_version: int = 1
    outcome: Outcome
    cleanup: Literal["clean", "releasing", "unproved"]
    message: str
    run_key: str
    storage: str | None
    workflow_id: str
    run_id: str
    steps: int | None = None
    phases: tuple[Phase, ...] = ()
    hosts: Hosts | None = None
    commits: tuple[Commit, ...] = ()
    victim: Victim | None = None
    strike: Strike | None = None
    drill: Recovery | None = None
    artifacts: Artifacts | None = None
    placement: Placement | None = None
    release: Release | None = None
    resumed: ResumePoint | None = None
    resume_from: str | None = None
    not_proved: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
