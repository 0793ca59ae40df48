"""Every tampered run is refused, by the check that is meant for it and with words that name what is wrong."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.small_run import (
    FINAL_COMMIT,
    KILLED_AT,
    ORDER,
    RECIPE,
    SmallRun,
    commit_name,
)
from tests.trainer.tampering import (
    OTHER,
    STEPS,
    Tamper,
    adds_step,
    blanks_commit_of_attempt_one,
    changes_kept_commit,
    deletes_kept_commit,
    doubles_rank,
    drops_commit,
    drops_step,
    evidence,
    failures,
    flips,
    flips_inside_checkpoint,
    forgets_momentum,
    inspected,
    journal_of_kept,
    kept_commit,
    links_checkpoint,
    links_state,
    loses_rank,
    manifest,
    metrics,
    native,
    packs,
    put_beside,
    record_with,
    records,
    repeats_step,
    replaced,
    reported,
    resaves,
    reshapes_kept_commit,
    restored_commit,
    result,
    row,
    same_process,
    snapshot,
    state,
    swaps_steps,
    truncates,
    truncates_kept_commit,
    unlearns,
)
from trainer.hashing import momentum_sha256

EXTRA_METRICS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("metrics.json", lambda document: document.update(note="x")),
    ("metrics.json, run", lambda document: document["run"].update(note="x")),
    ("metrics.json, recipe", lambda document: document["recipe"].update(note="x")),
    ("metrics.json, step 5", row(5, note="x")),
    ("metrics.json, attempt 2", lambda document: document["attempts"][1].update(note="x")),
    ("metrics.json, held_out", lambda document: document["held_out"].update(note="x")),
]
EXTRA_STATE: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("the top", lambda content: content.update(note="x"), "'note' is no field of it"),
    ("the model", lambda content: content["model"].update(note=torch.zeros(1)), "its model does not fit the recipe"),
    ("the optimizer", lambda content: content["optimizer"].update(note="x"), "optimizer: 'note'"),
    (
        "the optimizer's settings",
        lambda content: content["optimizer"]["param_groups"][0].update(note="x"),
        "optimizer group 0: 'note'",
    ),
    (
        "a parameter's state",
        lambda content: content["optimizer"]["state"][1].update(note=torch.zeros(1)),
        "state of parameter 1: 'note'",
    ),
]

# What is done to the run, the check that must fail, and what its message must name.
TAMPERED: list[tuple[str, Tamper, str, str]] = [
    # The manifest.
    ("metrics byte", flips("metrics.json"), "manifest", "metrics.json differs from its checksum"),
    ("state byte", flips("state.pt"), "manifest", "state.pt differs from its checksum"),
    ("recording byte", flips("metrics.rrd"), "manifest", "metrics.rrd differs from its checksum"),
    ("result byte", flips("result.json"), "manifest", "result.json differs from its checksum"),
    ("path outside", manifest(replaced("../state.pt")), "manifest", "'../state.pt', which is not a bare file name"),
    ("absolute path", manifest(replaced("/etc/passwd")), "manifest", "'/etc/passwd', which is not a bare file name"),
    ("path below", manifest(replaced("sub/state.pt")), "manifest", "'sub/state.pt', which is not a bare file name"),
    ("dots", manifest(replaced("..")), "manifest", "'..', which is not a bare file name"),
    ("backslash", manifest(replaced("..\\state.pt")), "manifest", "not a bare file name"),
    ("listed twice", manifest(lambda text: text + text.split("\n")[0] + "\n"), "manifest", "listed twice"),
    ("manifest cut", manifest(lambda text: text[:-20]), "manifest", "cut off"),
    ("manifest empty", manifest(lambda text: ""), "manifest", "lists nothing"),
    ("manifest garbage", manifest(lambda text: text + "hello\n"), "manifest", "line 5 of SHA256SUMS"),
    ("lists itself", manifest(lambda text: text + OTHER + "  SHA256SUMS\n"), "manifest", "lists itself"),
    ("no manifest", lambda run: (run.export / "SHA256SUMS").unlink(), "manifest", "SHA256SUMS is missing"),
    ("unlisted file", lambda run: (run.export / "extra.bin").write_text("x"), "manifest", "extra.bin is not listed"),
    ("folder", lambda run: (run.export / "more").mkdir(), "manifest", "more is a folder"),
    ("missing file", lambda run: (run.export / "state.pt").unlink(), "manifest", "state.pt is missing"),
    ("line dropped", manifest(lambda text: text.split("\n", 1)[1]), "manifest", "metrics.json is not listed"),
    ("link", links_state, "manifest", "state.pt is a link"),
    ("link not read", links_state, "state.pt", "links are not followed"),
    ("fifo", lambda run: os.mkfifo(run.export / "pipe"), "manifest", "pipe is a other"),
    # The journal.
    ("missing step", metrics(drops_step(13), recorded=True), "steps", f"missing step 13 of {STEPS}"),
    ("missing last", metrics(drops_step(STEPS), recorded=True), "steps", f"missing step {STEPS} of {STEPS}"),
    ("extra step", metrics(adds_step, recorded=True), "steps", f"extra step {STEPS + 1}"),
    ("step zero", metrics(row(1, step=0)), "steps", "extra step 0"),
    ("duplicate step", metrics(repeats_step(9), recorded=True), "steps", "duplicate step 9"),
    ("out of order", metrics(swaps_steps), "steps", "step 5 is out of order"),
    ("step no number", metrics(row(3, step="3")), "steps", "no object with a whole number"),
    ("steps no list", metrics(lambda document: document.update(steps={})), "steps", "missing step 1-24"),
    ("nan", metrics(row(5, loss=math.nan)), "scalars", "step 5: loss is not finite (nan)"),
    ("infinity", metrics(row(6, gradient_norm=math.inf)), "scalars", "step 6: gradient_norm is not finite (inf)"),
    ("negative", metrics(row(7, loss=-0.5)), "scalars", "step 7: loss is not positive (-0.5)"),
    ("no change", metrics(row(8, parameter_change=0.0)), "scalars", "step 8: parameter_change is not positive"),
    (
        "converged",
        metrics(lambda document: [row(step, parameter_change=0.0)(document) for step in (4, 6, 7)]),
        "scalars",
        "step 4: parameter_change is not positive (0.0), and so at step 6-7",
    ),
    ("no speed", metrics(row(9, samples_per_second=0)), "scalars", "step 9: samples_per_second is not positive"),
    ("text", metrics(row(2, loss="1.0")), "scalars", "step 2: loss is '1.0', no number"),
    ("truth value", metrics(row(2, loss=True)), "scalars", "step 2: loss is True, no number"),
    ("no scalar", metrics(lambda document: document["steps"][1].pop("loss")), "scalars", "step 2: loss is None"),
    ("learning rate", metrics(row(4, learning_rate=0.06)), "scalars", "step 4: learning_rate is 0.06"),
    ("no learning", metrics(unlearns, recorded=True), "learning", "no learning: the loss went from"),
    (
        "held-out rose",
        metrics(lambda document: document["held_out"].update(final_loss=1e6)),
        "learning",
        "no learning: the held-out loss went from",
    ),
    ("not JSON", lambda run: (run.export / "metrics.json").write_text("{"), "metrics.json", "is not JSON"),
    (
        "repeated key",
        lambda run: (run.export / "metrics.json").write_text('{"schema":1,"schema":1}'),
        "metrics.json",
        "'schema' is given twice",
    ),
    ("other schema", metrics(lambda document: document.update(schema=2)), "metrics.json", "schema 2"),
    (
        "other run",
        metrics(lambda document: document["run"].update(submission_id="other-train")),
        "metrics.json",
        "submission_id is 'other-train'",
    ),
    (
        "metrics of another run's key",
        metrics(lambda document: document["run"].update(run_key="other-0123456789")),
        "metrics.json",
        "run_key is 'other-0123456789'",
    ),
    ("recipe", metrics(lambda document: document["recipe"].update(features=0)), "steps", "recipe.features is 0"),
    ("credited", metrics(row(10, attempt=1)), "journal and evidence", "step 10 is credited to attempt 1, not 2"),
    ("doubled rank", doubles_rank, "journal and evidence", "rank 0 is doubled"),
    (
        "journal rank differs",
        metrics(lambda document: document["attempts"][1]["ranks"][1].update(local_rank=1)),
        "journal and evidence",
        "rank 1 differs from its own evidence in local_rank",
    ),
    (
        "attempt missing",
        metrics(lambda document: document["attempts"].pop(0)),
        "journal and evidence",
        "attempt 1 is missing",
    ),
    # The ranks' evidence.
    ("rank missing", loses_rank, "ranks", "attempt 2: rank 1 is missing (world size 2)"),
    (
        "world size",
        evidence(2, (1,), lambda document: document.update(world_size=3)),
        "ranks",
        "world_size is 3, not 2",
    ),
    ("rank renamed", evidence(2, (1,), lambda document: document.update(rank=0)), "ranks", "rank is 0, not 1"),
    ("same process", same_process, "ranks", "rank 1 is the same process as rank 0"),
    (
        "extra rank",
        lambda run: shutil.copy(run.evidence(2, 1), run.evidence(2, 2)),
        "ranks",
        "attempt 2: rank 2 is outside the world of 2",
    ),
    (
        "attempt gone",
        lambda run: shutil.rmtree(run.evidence(1, 0).parent),
        "ranks",
        "attempts are numbered 2, not 1 to 1",
    ),
    ("no evidence", lambda run: shutil.rmtree(run.root / "evidence"), "ranks", "the ranks left no evidence"),
    (
        "restored apart",
        evidence(2, (1,), lambda document: document.update(restored_step=4)),
        "restored state",
        "ranks differ in restored_step (rank 0: 8, rank 1: 4)",
    ),
    (
        "model apart",
        evidence(2, (1,), lambda document: document.update(model_sha256=OTHER)),
        "restored state",
        "ranks differ in model_sha256",
    ),
    (
        "momentum apart",
        evidence(2, (0,), lambda document: document.update(momentum_sha256=OTHER)),
        "restored state",
        "ranks differ in momentum_sha256",
    ),
    (
        "nothing restored",
        evidence(2, (0, 1), lambda document: document.update(momentum_sha256=momentum_sha256({"state": {}}))),
        "restored state",
        "rank 0: restored step 8 without any momentum",
    ),
    (
        "momentum from nowhere",
        evidence(1, (0, 1), lambda document: document.update(momentum_sha256=OTHER)),
        "restored state",
        "restored step 0, yet",
    ),
    (
        "other state restored",
        evidence(2, (0, 1), lambda document: document.update(model_sha256=OTHER)),
        "restored from commits",
        f"as in {commit_name(KILLED_AT, 1)}",
    ),
    (
        "uncommitted restored",
        snapshot(blanks_commit_of_attempt_one),
        "restored from commits",
        "which was never committed",
    ),
    ("restored truncated", truncates(restored_commit), "restored from commits", "checkpoint damaged: train/main/"),
    (
        "first step skipped",
        evidence(2, (1,), lambda document: document.update(step=10), "first-step"),
        "first steps",
        "rank 1: its first step is 10, not 9, the step after the restored one",
    ),
    ("first step missing", lambda run: run.evidence(2, 0, "first-step").unlink(), "first steps", "is not recorded"),
    (
        "parameters apart",
        evidence(2, (1,), lambda document: document.update(model_sha256=OTHER), "final"),
        "final state of ranks",
        "ranks ended with different parameters",
    ),
    (
        "final momentum apart",
        evidence(2, (1,), lambda document: document.update(momentum_sha256=OTHER), "final"),
        "final state of ranks",
        "ranks ended with different momentum",
    ),
    (
        "no final",
        lambda run: run.evidence(2, 1, "final").unlink(),
        "final state of ranks",
        "rank 1 left no final evidence",
    ),
    (
        "ended early",
        evidence(2, (0, 1), lambda document: document.update(step=20), "final"),
        "final state of ranks",
        "rank 0 ended at step 20, not 24",
    ),
    (
        "versions apart",
        evidence(2, (1,), lambda document: document["versions"].update(ray="2.57.0")),
        "versions",
        "ray is '2.57.0', not '2.58.0'",
    ),
    (
        "device type",
        evidence(2, (0, 1), lambda document: document["device"].update(type="cuda")),
        "versions",
        "trained on 'cuda', not on 'cpu'",
    ),
    ("evidence no JSON", lambda run: run.evidence(2, 0).write_text("]"), "ranks", "rank-0.start.json is not JSON"),
    # The recording.
    ("recording short", records(lambda steps: steps.pop()), "recording", f"/train/loss lacks step {STEPS}"),
    (
        "recording long",
        records(lambda steps: steps.append({**steps[-1], "step": STEPS + 1})),
        "recording",
        f"/train/loss holds step {STEPS + 1}, which metrics.json does not",
    ),
    ("recording doubled", records(lambda steps: steps.append(steps[3])), "recording", "/train/loss holds step 4 twice"),
    ("recording of another run", records(lambda steps: None, "other-train"), "recording", "it belongs to another run"),
    (
        "journal unlike the recording",
        metrics(lambda document: row(11, loss=document["steps"][10]["loss"] * (1 + 1e-12))(document)),
        "recording",
        "/train/loss, step 11: recorded",
    ),
    ("recording truncated", truncates(lambda run: run.export / "metrics.rrd"), "rrd verify", "refuses the recording"),
    (
        "recording garbage",
        lambda run: (run.export / "metrics.rrd").write_bytes(b"RRF2" + b"\0" * 64),
        "recording",
        "metrics.rrd",
    ),
    # The result, the state and the checkpoint.
    ("status", result(lambda document: document.update(status="failed")), "result", "status is 'failed'"),
    ("final loss", result(lambda document: document.update(final_loss=0.5)), "result", "final_loss is 0.5"),
    ("held-out claim", result(lambda document: document.update(held_out_loss=0.5)), "result", "held_out_loss is 0.5"),
    (
        "checkpoint outside",
        result(lambda document: document.update(checkpoint="train/main/../../x")),
        "result",
        "names the checkpoint 'train/main/../../x'",
    ),
    (
        "parameters claim",
        result(lambda document: document.update(parameters_sha256=OTHER)),
        "state.pt",
        "(parameters_sha256)",
    ),
    (
        "momentum claim",
        result(lambda document: document.update(momentum_sha256=OTHER)),
        "state.pt",
        "(momentum_sha256)",
    ),
    (
        "rank claim",
        result(lambda document: document["ranks_final"][1].update(model_sha256=OTHER)),
        "final state of ranks",
        "result.json, rank 1: model_sha256",
    ),
    (
        "rank claim missing",
        result(lambda document: document["ranks_final"].pop()),
        "final state of ranks",
        "does not list rank 0-1",
    ),
    (
        "state of other parameters",
        resaves(state, lambda content: content["model"]["weight"].add_(1e-3)),
        "state.pt",
        "(parameters_sha256)",
    ),
    (
        "held-out figure",
        metrics(lambda document: document["held_out"].update(final_loss=document["held_out"]["final_loss"] * 1.001)),
        "held-out loss",
        "the held-out loss recomputed from state.pt is",
    ),
    (
        "initial figure",
        metrics(lambda document: document["held_out"].update(initial_loss=1e3)),
        "held-out loss",
        "the held-out loss of the initial parameters is",
    ),
    ("state momentum", resaves(state, forgets_momentum), "state.pt", "momentum is incomplete: parameter 1 of 2"),
    ("state truncated", truncates(state), "state.pt", "checkpoint damaged: exports/"),
    ("momentum incomplete", resaves(native, forgets_momentum), "checkpoint", "momentum is incomplete: parameter 1"),
    (
        "momentum gone",
        resaves(native, lambda content: content["optimizer"]["state"].clear()),
        "checkpoint",
        "momentum is incomplete: parameter 0 of 2 has no buffer",
    ),
    (
        "momentum shape",
        resaves(native, lambda content: content["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(3))),
        "checkpoint",
        "momentum of parameter 0 is [3]",
    ),
    (
        "momentum nan",
        resaves(native, lambda content: content["optimizer"]["state"][0]["momentum_buffer"].fill_(math.nan)),
        "checkpoint",
        "momentum of parameter 0 is not finite",
    ),
    (
        "momentum altered",
        resaves(native, lambda content: content["optimizer"]["state"][0]["momentum_buffer"].mul_(1.5)),
        "checkpoint",
        "momentum_sha256",
    ),
    ("other step", resaves(native, lambda content: content.update(step=20)), "checkpoint", "step is 20, not 24"),
    ("no optimizer", resaves(native, lambda content: content.pop("optimizer")), "checkpoint", "holds no optimizer"),
    (
        "model shape",
        resaves(native, lambda content: content["model"].update(weight=torch.zeros(1, 3))),
        "checkpoint",
        "its model does not fit the recipe",
    ),
    (
        "optimizer rate",
        resaves(native, lambda content: content["optimizer"]["param_groups"][0].update(lr=1.0)),
        "checkpoint",
        "lr is 1.0, not 0.05",
    ),
    (
        "checkpoint truncated",
        truncates(native),
        "checkpoint",
        f"checkpoint damaged: train/main/{FINAL_COMMIT}/checkpoint.pt",
    ),
    ("checkpoint empty", lambda run: native(run).write_bytes(b""), "checkpoint", "it is truncated or no torch archive"),
    ("checkpoint byte", flips_inside_checkpoint, "checkpoint", "differs from its checksum"),
    ("checkpoint missing", lambda run: native(run).unlink(), "checkpoint", "it is missing"),
    (
        "uncommitted checkpoint",
        snapshot(lambda document: [document[key].pop() for key in ("checkpoint_results", "checkpoint_report_indices")]),
        "commit",
        f"{FINAL_COMMIT} is not in Ray Train's commit record",
    ),
    (
        "older checkpoint",
        result(lambda document: document.update(checkpoint=f"train/main/{commit_name(20, 2)}")),
        "commit",
        f"is not the newest commit, which is {FINAL_COMMIT}",
    ),
    (
        "no commit record",
        lambda run: (run.root / "train" / "main" / "checkpoint_manager_snapshot.json").unlink(),
        "commit",
        "checkpoint_manager_snapshot.json is missing",
    ),
    (
        "checkpoint journal",
        lambda run: run.edit(run.checkpoint / "journal.json", row(3, loss=9.0)),
        "checkpoint journal",
        "differs from metrics.json in step 3",
    ),
    (
        "a kept commit is not what was reported",
        changes_kept_commit,
        "kept commits",
        "its model differ from what was reported at its commit",
    ),
    (
        "a kept commit is truncated",
        truncates_kept_commit,
        "kept commits",
        "truncated",
    ),
    (
        "a kept optimizer's rate",
        resaves(kept_commit, lambda content: content["optimizer"]["param_groups"][0].update(lr=0.5)),
        "kept commits",
        "optimizer group 0: lr is 0.5, not 0.05",
    ),
    (
        "a kept optimizer's other setting",
        resaves(kept_commit, lambda content: content["optimizer"]["param_groups"][0].update(nesterov=True)),
        "kept commits",
        "optimizer group 0: nesterov is True, not False",
    ),
    (
        "a tensor more in a kept optimizer",
        resaves(kept_commit, lambda content: content["optimizer"]["state"][0].update(note=torch.zeros(3))),
        "kept commits",
        "state of parameter 0: 'note' is no field of it",
    ),
    ("a kept model's shape", reshapes_kept_commit, "kept commits", "its model does not fit the recipe"),
    (
        "checkpoint linked",
        links_checkpoint,
        "checkpoint",
        "reached through a link",
    ),
    # The commits kept, and Ray's record of them.
    (
        "a kept journal's loss",
        journal_of_kept(row(3, loss=9.0)),
        "kept journals",
        f"{commit_name(16, 2)}/journal.json differs from metrics.json in step 3",
    ),
    (
        "a kept journal's last row",
        journal_of_kept(row(16, gradient_norm=9.0)),
        "kept journals",
        "differs from metrics.json in step 16",
    ),
    (
        "a kept journal's recipe",
        journal_of_kept(lambda document: document["recipe"].update(seed=8)),
        "kept journals",
        "recipe is",
    ),
    (
        "a kept journal's attempt",
        journal_of_kept(row(12, attempt=1, loss=9.0)),
        "kept journals",
        "differs from metrics.json in step 12",
    ),
    (
        "a field more in a kept journal",
        journal_of_kept(lambda document: document.update(note="x")),
        "kept journals",
        "'note' is no field of it",
    ),
    (
        "a field more in a kept row",
        journal_of_kept(row(5, note="x")),
        "kept journals",
        "differs from metrics.json in step 5",
    ),
    ("a kept commit is gone", deletes_kept_commit, "commit record", f"{commit_name(16, 2)} is listed as committed"),
    (
        "the last commit is gone",
        lambda run: shutil.rmtree(run.checkpoint),
        "commit record",
        "nothing of it is in storage",
    ),
    ("loss reported", reported(loss=9.0), "kept journals", f"{commit_name(16, 2)}: loss is 9.0"),
    ("speed reported", reported(samples_per_second=9.0), "kept journals", "samples_per_second is 9.0"),
    ("step reported", reported(step=12), "kept journals", "step is 12, not 16"),
    ("attempt reported", reported(attempt=1), "kept journals", "attempt is 1, not 2"),
    ("steps reported", reported(steps=25), "kept journals", "steps is 25, not 24"),
    ("a field more reported", reported(note="x"), "kept journals", "'note' is no field of it"),
    ("hash reported", reported(model_sha256=OTHER), "kept commits", "its model differ from what was reported"),
    ("no hash reported", reported(momentum_sha256=None), "kept commits", "its momentum differ from what was reported"),
    (
        "last loss reported",
        snapshot(lambda document: document["latest_checkpoint_result"]["metrics"].update(loss=9.0)),
        "commit record",
        "latest_checkpoint_result is not the newest commit",
    ),
    *(
        (f"commit {number} dropped, {how}", drops_commit(number, deleted), "commits in order", words)
        for how, deleted in (("its folder left", False), ("and deleted", True))
        for number, words in (
            (0, f"the record lists 5 commits, from {commit_name(8, 1)} on"),
            (1, "the commit of step 8 is not listed"),
            (2, "the commit of step 12 is not listed"),
            (3, "the commit of step 16 is not listed"),
        )
    ),
    (
        "dropped and counted anew",
        drops_commit(3, True, renumbered=True),
        "commits in order",
        "the commit of step 16 is not listed",
    ),
    (
        "listed twice",
        snapshot(lambda document: document["checkpoint_results"].insert(3, document["checkpoint_results"][3])),
        "commit record",
        f"lists {commit_name(16, 2)} 2 times",
    ),
    (
        "order of commits",
        snapshot(lambda document: document["checkpoint_report_indices"].reverse()),
        "commits in order",
        "is not listed",
    ),
    (
        "no order of commits",
        snapshot(lambda document: document.update(checkpoint_report_indices=None)),
        "commit record",
        "gives no order to its commits",
    ),
    (
        "commits to come",
        snapshot(lambda document: document.update(current_report_index=3)),
        "commit record",
        "current_report_index is 3",
    ),
    # What no check would read.
    (
        "root of another run",
        lambda run: run.edit(run.root / "owner.json", methodcaller("update", {"run_key": "other-0123456789"})),
        "owner",
        "run_key is 'other-0123456789', not",
    ),
    (
        "step of a rank's claim",
        result(lambda document: document["ranks_final"][0].update(step=3)),
        "final state of ranks",
        "result.json, rank 0: step is 3, not 24",
    ),
    *(
        (f"a field more in {where} of the result", result(change), "result", f"{where}: 'note' is no field of it")
        for where, change in (
            ("rank 1", lambda document: document["ranks_final"][1].update(note="x")),
            ("versions", lambda document: document["versions"].update(note="x")),
        )
    ),
    ("another Ray's record", record_with(ray_version="9.9.9"), "commit record", "ray_version is '9.9.9', not '2.58.0'"),
    ("a field more in the record", record_with(note="x"), "commit record", "'note' is no field of it"),
    (
        "a field more in a listed commit",
        snapshot(lambda document: document["checkpoint_results"][1].update(note="x")),
        "commit record",
        f"{commit_name(8, 1)}: 'note' is no field of it",
    ),
    ("a commit awaits nothing", record_with(pending_training_results={"x": 1}), "commit record", "pending_training"),
    (
        "commits that there never were",
        record_with(current_report_index=999),
        "commit record",
        "current_report_index is 999, which its commits do not lead up to",
    ),
    (
        "commits that were never dropped",
        record_with(checkpoint_report_indices=list(range(10, 16)), current_report_index=16),
        "commit record",
        "current_report_index is 16, which its commits do not lead up to",
    ),
    *(
        (
            f"a field more in {kind} evidence",
            evidence(2, (0,), methodcaller("update", {"note": "x"}), kind),
            check,
            words,
        )
        for kind, check, words in (
            ("first-step", "first steps", "attempt 2, rank 0, first-step: 'note' is no field of it"),
            ("final", "final state of ranks", "attempt 2, rank 0, final: 'note' is no field of it"),
        )
    ),
    *(
        (f"time of {kind} evidence, {at}", evidence(2, (1,), methodcaller("update", {"at": at}), kind), check, words)
        for kind, check in (("first-step", "first steps"), ("final", "final state of ranks"))
        for at, words in (
            ("1999-01-01T00:00:00Z", "before the attempt began"),
            ("2026-11-30T12:00:00", "no time in UTC"),
            ("today", "no time in UTC"),
        )
    ),
    *(
        (f"a file more in {what}", put_beside(place), "kept commits", "note.bin is no file of a commit")
        for what, place in (("a kept commit", kept_commit), ("the last commit", native))
    ),
    *(
        (f"{name} in {what}", packs(place, name), check, f"{name}, which torch does not read")
        for what, place, check in (
            ("a kept commit", kept_commit, "kept commits"),
            ("the last commit", native, "checkpoint"),
            ("state.pt", state, "state.pt"),
        )
        for name in ("data/note", "data/4")
    ),
    (
        "a kept row of an attempt that never made it",
        journal_of_kept(row(10, attempt=1, samples_per_second=1.0)),
        "kept journals",
        "step 10 is credited to attempt 1, not 2",
    ),
    *(
        (f"a field more in {where}", metrics(change), "metrics.json", f"{where}: 'note' is no field of it")
        for where, change in EXTRA_METRICS
    ),
    ("a field less", metrics(lambda document: document.pop("device")), "metrics.json", "device is missing"),
    (
        "a field more in a rank of the journal",
        metrics(lambda document: document["attempts"][1]["ranks"][0].update(note="x")),
        "journal and evidence",
        "differs from its own evidence in note",
    ),
    ("a field more in the result", result(lambda document: document.update(note="x")), "result", "'note' is no field"),
    *(
        (f"a field more in {what} of state.pt", resaves(state, change), "state.pt", words)
        for what, change, words in (*EXTRA_STATE, ("the run", lambda d: d["run"].update(note="x"), "run: 'note'"))
    ),
    *(
        (f"a field more in {what} of checkpoint.pt", resaves(native, change), "checkpoint", words)
        for what, change, words in EXTRA_STATE[1:]
    ),
    (
        "a field more in a kept checkpoint.pt",
        resaves(kept_commit, lambda content: content.update(note="x")),
        "kept commits",
        "checkpoint.pt: 'note' is no field of it",
    ),
    (
        "an optimizer's other setting",
        resaves(state, lambda content: content["optimizer"]["param_groups"][0].update(weight_decay=0.5)),
        "state.pt",
        "weight_decay is 0.5, not 0",
    ),
]


@pytest.mark.parametrize(
    ("tamper", "check", "words"), [case[1:] for case in TAMPERED], ids=[case[0] for case in TAMPERED]
)
def test_tampered_run_is_refused_by_name(run: SmallRun, tmp_path: Path, tamper: Tamper, check: str, words: str) -> None:
    tamper(run)
    status, outcome = inspected(run, tmp_path)
    assert status == 1
    assert outcome["ok"] is False
    found = failures(outcome)
    assert check in found, found
    assert words in found[check], found[check]
    # Everything else was still tried.
    assert len(outcome["checks"]) + len(outcome["not_applicable"]) == 29
    assert not [detail for detail in found.values() if detail.startswith("cannot be checked")], found


ORDERED: list[tuple[str, dict[str, Any], str, str]] = [
    ("recipe", {"workload": {"kind": "regression", "recipe": {**RECIPE, "seed": 8}}}, "order", "seed is 7, not 8"),
    ("device", {"device": "cuda"}, "order", "device is 'cpu', not 'cuda'"),
    ("world size", {"world_size": 4}, "ranks", "rank 2-3 is missing (world size 4)"),
    ("torch build", {"pins": {"torch": "2.13.0+cu130"}}, "versions", "not '2.13.0+cu130'"),
    ("run key", {"run_key": "other-0123456789"}, "metrics.json", "not 'other-0123456789'"),
    (
        "resume",
        {"resume": {"checkpoint": "s3://bucket/runs/earlier/train/main/checkpoint_1"}},
        "restored state",
        "attempt 1 restored nothing",
    ),
]


@pytest.mark.parametrize(
    ("change", "check", "words"), [case[1:] for case in ORDERED], ids=[case[0] for case in ORDERED]
)
def test_run_that_is_not_the_ordered_one_is_refused(
    run: SmallRun, tmp_path: Path, change: dict[str, Any], check: str, words: str
) -> None:
    status, outcome = inspected(run, tmp_path, order={**ORDER, **change})
    assert status == 1
    assert words in failures(outcome)[check]
