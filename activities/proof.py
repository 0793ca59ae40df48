"""Proving placement and recovery from evidence that the ranks left in storage. The judgement itself is pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import beating
from activities.storage import Storage
from workflows import activity_names
from workflows.evidence import Commit, Placement, Proof, ProofOrder, Recovery

Evidence = dict[str, Any]

CONTRACT: Final = "docs/workload-contract.md"
_NEEDED: Final[Mapping[str, Mapping[str, type]]] = {
    "start": {
        "attempt": int,
        "rank": int,
        "world_size": int,
        "device.fingerprint": str,
        "host.fingerprint": str,
        "ray.node_id": str,
        "ray.address": str,
        "process.pid": int,
        "process.start_time": int,
        "process.boot_id": str,
        "restored_step": int,
        "model_sha256": str,
        "momentum_sha256": str,
        "at": str,
    },
    "first-step": {"attempt": int, "rank": int, "step": int, "at": str},
    "final": {"attempt": int, "rank": int, "step": int, "model_sha256": str, "momentum_sha256": str, "at": str},
}
"""What is relied on in each kind of a rank's evidence; the inspector looks closer."""


class Proving:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @activity.defn(name=activity_names.PROVE)
    async def prove(self, order: ProofOrder) -> Proof:
        """Read all evidence of the run, and judge it."""
        async with beating(note="reading evidence"):
            main = await self._evidence(order, "main")
            parity = await self._evidence(order, "parity") if order.parity else {}
        starts = [e for name, e in main.items() if name.endswith(".start.json")]
        if not starts:
            raise ApplicationError(
                f"the training left no evidence of where its ranks ran (see {CONTRACT})",
                type="NoEvidence",
                non_retryable=True,
            )
        return Proof(
            placement=placement(starts),
            recovery=recovery(order, main, parity) if order.victim or order.parity else None,
        )

    async def _evidence(self, order: ProofOrder, train_name: str) -> dict[str, Evidence]:
        root = f"{order.identity.storage}/evidence/{train_name}/"
        found: dict[str, Evidence] = {}
        for name in sorted(await self._storage.names(root, limit=20_000)):
            got = await self._storage.get(root + name)
            if got and got.body is not None:
                try:
                    found[name] = evidence_in(name, got.body)
                except ValueError as error:
                    raise ApplicationError(
                        f"evidence {root}{name}: {error}", type="NoEvidence", non_retryable=True
                    ) from error
        return found


def evidence_in(name: str, body: bytes) -> Evidence:
    """A rank's evidence, with everything that is relied on. Raises ValueError that says what is not as it should be."""
    kind = name.removesuffix(".json").rpartition(".")[2]
    if kind not in _NEEDED:
        raise ValueError(f"is no name of a rank's evidence (see {CONTRACT})")
    told = json.loads(body)
    for path, wanted in _NEEDED[kind].items():
        value: Any = told
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{path} is {value!r} where {_WORDS[wanted]} belongs (see {CONTRACT})")
    _when(told["at"])
    return dict(told)


_WORDS: Final = {int: "a whole number", str: "a text"}


def placement(starts: Sequence[Evidence]) -> Placement:
    """Where the ranks of the newest attempt ran. Ranks of all attempts are listed."""
    newest = max(int(s["attempt"]) for s in starts)
    last = [s for s in starts if int(s["attempt"]) == newest]
    return Placement(
        ranks=tuple(sorted(starts, key=lambda s: (int(s["attempt"]), int(s["rank"])))),
        distinct_hosts=len({s["host"]["fingerprint"] for s in last}),
        distinct_nodes=len({s["ray"]["node_id"] for s in last}),
        distinct_devices=len({_device(s) for s in last}),
    )


def _device(start: Evidence) -> str:
    """What a rank computed on. Ranks of one machine share its processors, whatever Ray nodes they run on."""
    part = "device" if start["device"].get("type") == "cuda" else "host"
    return str(start[part]["fingerprint"])


def recovery(order: ProofOrder, main: dict[str, Evidence], parity: dict[str, Evidence]) -> Recovery:
    """Judge a drill: every rank's first step after the restart is the committed step + 1, with model and momentum
    restored and equal by hash on all ranks; with parity, the final parameters equal the uninterrupted run's."""
    problems: list[str] = []
    victim, strike = order.victim, order.strike
    attempts = max((int(e["attempt"]) for e in main.values()), default=0)
    resumed_step: int | None = None
    seconds: float | None = None
    first_steps: dict[str, int] = {}
    model = momentum = None
    committed = victim.commit.step if victim else 0
    if victim:
        after = _after(main, victim.attempt)
        if strike is None or strike.outcome != "killed":
            problems.append("the victim was gone before it was struck; nothing was shown by a kill")
        if not after:
            problems.append(f"training did not start again after attempt {victim.attempt}")
        else:
            resumed = [e for n, e in after.items() if n.endswith(".start.json")]
            problems += _restored(resumed, victim.commit, order.world_size)
            firsts = {int(e["rank"]): e for n, e in after.items() if n.endswith(".first-step.json")}
            first_steps = {str(rank): int(e["step"]) for rank, e in sorted(firsts.items())}
            for rank in range(order.world_size):
                step = first_steps.get(str(rank))
                if step is None:
                    problems.append(f"rank {rank} made no step after the restart")
                elif step != committed + 1:
                    problems.append(f"rank {rank} went on at step {step}, not at {committed + 1}")
            models = {e["model_sha256"] for e in resumed}
            momenta = {e["momentum_sha256"] for e in resumed}
            model = next(iter(models)) if len(models) == 1 else None
            momentum = next(iter(momenta)) if len(momenta) == 1 else None
            resumed_step = min(first_steps.values(), default=None)
            if firsts and strike:
                seconds = max(_when(e["at"]) for e in firsts.values()) - strike.at
    compared: Literal["equal", "different", "not_asked"]
    compared = _parity(main, parity, order.world_size, problems) if order.parity else "not_asked"
    return Recovery(
        proved=not problems,
        problems=tuple(problems),
        committed_step=committed,
        resumed_step=resumed_step,
        first_steps=first_steps,
        attempts=attempts,
        seconds_to_resume=seconds,
        model_sha256=model,
        momentum_sha256=momentum,
        parity=compared,
    )


def _after(main: dict[str, Evidence], attempt: int) -> dict[str, Evidence]:
    """Evidence of the first attempt after the struck one."""
    later = sorted({int(e["attempt"]) for e in main.values() if int(e["attempt"]) > attempt})
    return {n: e for n, e in main.items() if later and int(e["attempt"]) == later[0]}


def _restored(resumed: Sequence[Evidence], commit: Commit, world_size: int) -> list[str]:
    problems, committed = [], commit.step
    ranks = sorted(int(e["rank"]) for e in resumed)
    if ranks != list(range(world_size)):
        problems.append(f"ranks after the restart were {ranks}, not 0..{world_size - 1} once each")
    for e in resumed:
        step = int(e["restored_step"])
        if not e.get("restored_from"):
            problems.append(f"rank {e['rank']} restored nothing; it started from scratch")
        elif step != committed:
            how = "an earlier" if step < committed else "a later"
            problems.append(f"rank {e['rank']} resumed from {how} commit, step {step}, not from step {committed}")
        else:
            problems += [
                f"rank {e['rank']} went on with another {what} than the commit of step {committed} holds"
                for what, held in (("model", commit.model_sha256), ("momentum", commit.momentum_sha256))
                if held is not None and e[f"{what}_sha256"] != held
            ]
    differing = [w for w in ("model_sha256", "momentum_sha256") if len({e[w] for e in resumed}) > 1]
    return problems + [f"ranks restored different {what.split('_')[0]} state" for what in differing]


def _parity(
    main: dict[str, Evidence], parity: dict[str, Evidence], world_size: int, problems: list[str]
) -> Literal["equal", "different"]:
    def final(evidence: dict[str, Evidence]) -> set[tuple[str, str]]:
        """Of all ranks; empty unless every one left it."""
        ends = [e for n, e in evidence.items() if n.endswith(".final.json")]
        complete = {int(e["rank"]) for e in ends} == set(range(world_size))
        return {(e["model_sha256"], e["momentum_sha256"]) for e in ends} if complete else set()

    ours, theirs = final(main), final(parity)
    if len(ours) == 1 and ours == theirs:
        return "equal"
    problems.append(
        "final parameters differ from the uninterrupted run's"
        if ours and theirs
        else "final evidence is missing, so parity with the uninterrupted run cannot be judged"
    )
    return "different"


def _when(at: str) -> float:
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
