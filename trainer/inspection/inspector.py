"""Which checks apply to a run, and in what order they are made. Every one that can be made is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.inspection import evidence as ev
from trainer.inspection import journal, recording
from trainer.inspection import result as res
from trainer.inspection.checklist import Checklist, Failed, NotApplicable, Once, compare, require
from trainer.inspection.checkpoints import (
    JOURNAL_FILE,
    NATIVE_FILE,
    Commit,
    Reloaded,
    check_journal,
    check_kept,
    check_loads,
    load_archive,
    read_commits,
    reload,
)
from trainer.inspection.lineage import Lineage
from trainer.inspection.manifest import check_manifest
from trainer.inspection.record import check_journals, check_own_record, check_record, check_sequence
from trainer.inspection.storage import BARE_NAME, BLOB_LIMIT, Missing, Root, Unreadable, UnusableInput, read_object

EXPORTED = ("state.pt", "metrics.json", "metrics.rrd", "result.json")
OWNER = "owner.json"
TRAINING = "-train"
"""What the id of a run's own training ends in, after the run key."""


@dataclass(frozen=True)
class Question:
    """What is asked about a run: which submission, and what it must have been beyond what every run must
    be.
    """

    submission: str
    elsewhere: Callable[[str], Root]
    """Opens the root of another run, for the checkpoint this one was continued from. Raises UnusableInput."""
    order: Mapping[str, Any] | None = None
    distinct_devices: bool = False
    distinct_hosts: bool = False

    def ordered(self, *keys: str) -> Any:
        """A value of the order the run was to follow, None where no order or no such value is known."""
        value: Any = self.order
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def choose_submission(root: Root, asked: str | None) -> tuple[str, tuple[str, ...]]:
    """The submission to inspect, and the exports that were passed over without being asked.

    The one asked for, else the only export there, else the run's own training (``<run key>-train``): a run with
    parity exports twice. Raises UnusableInput.
    """
    try:
        exports = [entry.name for entry in root.entries("exports")]
    except Unreadable as error:
        raise UnusableInput(f"{root.location}: {error}") from None
    if asked is not None:
        if not BARE_NAME.fullmatch(asked):
            raise UnusableInput(f"{asked!r} is no submission id")
        if exports and asked not in exports:
            raise UnusableInput(f"{root.location} holds no export of {asked}; there are: {', '.join(exports)}")
        return asked, ()
    if not exports:
        raise UnusableInput(
            f"{root.location} holds no exports/; give the run's root (it ends in the run key), or wait for the export"
        )
    own = [name for name in exports if name.endswith(TRAINING) and root.run_key in (None, name.removesuffix(TRAINING))]
    choice = exports if len(exports) == 1 else own
    if len(choice) != 1:
        raise UnusableInput(
            f"{root.location} holds {len(exports)} exports; choose with --submission: {', '.join(exports)}"
        )
    return choice[0], tuple(name for name in exports if name != choice[0])


def inspect(root: Root, question: Question) -> Checklist:
    """All checks of one submission's export and of the training behind it."""
    return _Inspection(root, question).run()


class _Inspection:
    def __init__(self, root: Root, question: Question) -> None:
        self._root = root
        self._question = question
        self._folder = f"exports/{question.submission}"
        self._list = Checklist()
        self._metrics = Once("metrics.json", partial(self._document, "metrics.json"))
        self._result = Once("result.json", partial(self._document, "result.json"))
        self._kind = self._find_kind()
        self._train_name = self._find_train_name()
        self._evidence = Once("the evidence", self._read_evidence)
        self._commits = Once("the commit record", partial(read_commits, root, self._train_name))
        self._state = Once("state.pt", partial(self._reload, f"{self._folder}/state.pt"))
        self._checkpoint = Once("the checkpoint", self._reload_checkpoint)

    def run(self) -> Checklist:
        self._list.figures["workload"] = self._kind
        exported = self._check if self._kind == "regression" else self._skip
        self._check("owner", self._owner)
        self._check("manifest", self._manifest)
        exported("metrics.json", self._identity)
        self._check("order", self._order)
        exported("steps", lambda: journal.check_steps(self._metrics.get()))
        exported("scalars", lambda: journal.check_scalars(self._metrics.get()))
        exported("learning", lambda: journal.check_learning(self._metrics.get()))
        self._check("ranks", self._ranks)
        exported("journal and evidence", lambda: ev.check_journal_evidence(self._attempts(), self._metrics.get()))
        self._check("restored state", self._restored)
        self._check("restored from commits", self._restored_commits)
        self._check("first steps", self._first_steps)
        self._check("versions", self._versions)
        self._check("distinct devices", partial(self._distinct, "device", self._question.distinct_devices))
        self._check("distinct hosts", partial(self._distinct, "host", self._question.distinct_hosts))
        self._check("final state of ranks", self._final)
        exported("rrd verify", lambda: recording.check_tool(self._recording(), "verify"))
        exported("rrd print", lambda: recording.check_tool(self._recording(), "print", "-vv"))
        exported("recording", self._decoded_recording)
        self._check("result", self._check_result)
        exported("state.pt", self._check_state)
        self._check("commit record", self._commit_record)
        exported("commits in order", self._commits_in_order)
        self._check("commit", self._check_commit)
        self._check("checkpoint", self._check_checkpoint)
        self._check("kept commits", self._check_kept)
        exported("kept journals", self._kept_journals)
        exported("checkpoint journal", self._checkpoint_journal)
        exported("held-out loss", self._held_out)
        self._figures()
        return self._list

    def _check(self, name: str, check: Callable[[], str]) -> None:
        self._list.run(name, check)

    def _skip(self, name: str, _check: Callable[[], str]) -> None:
        def skip() -> str:
            raise NotApplicable(f"a {self._kind} workload promises nothing of the kind")

        self._list.run(name, skip)

    # What the checks share.

    def _document(self, name: str) -> dict[str, Any]:
        return read_object(self._root, f"{self._folder}/{name}")

    def _optional(self, made: Once) -> Mapping[str, Any] | None:
        """A document where it can be had; that it cannot is another check's to say."""
        try:
            document: Mapping[str, Any] = made.get()
        except Exception:
            return None
        return document

    def _find_kind(self) -> str:
        """The order's word, else the export's own. Where nothing says, everything is asked of the run."""
        named = [self._question.ordered("workload", "kind")]
        if named == [None]:
            named = [(self._optional(made) or {}).get("workload") for made in (self._metrics, self._result)]
        return "script" if next((kind for kind in named if kind), None) == "script" else "regression"

    def _find_train_name(self) -> str:
        named = [self._question.ordered("train_name")]
        for made in (self._result, self._metrics):
            run = (self._optional(made) or {}).get("run")
            named.append(run.get("train_name") if isinstance(run, dict) else None)
        return next((name for name in named if isinstance(name, str) and BARE_NAME.fullmatch(name)), "main")

    def _run(self) -> dict[str, Any]:
        """The names that every document of this run must carry."""
        run = {"submission_id": self._question.submission, "train_name": self._train_name}
        # A local copy's place says nothing; the export's own name does.
        named = self._question.submission.removesuffix(TRAINING)
        run_key = (
            self._question.ordered("run_key")
            or self._root.run_key
            or (named if named != self._question.submission else None)
        )
        return run if run_key is None else {**run, "run_key": run_key}

    def _read_evidence(self) -> ev.Evidence:
        size = self._question.ordered("world_size")
        if size is None and self._kind == "regression":
            size = (self._optional(self._metrics) or {}).get("world_size")
        return ev.read_evidence(self._root, self._train_name, size)

    def _attempts(self) -> ev.Evidence:
        evidence: ev.Evidence = self._evidence.get()
        return evidence

    def _last_attempt(self) -> ev.Attempt | None:
        try:
            return self._attempts().last
        except Exception:
            return None

    def _reload(self, path: str) -> Reloaded:
        return reload(path, load_archive(self._root, path), journal.recipe_of(self._metrics.get()))

    def _checkpoint_folder(self) -> str:
        if self._kind == "regression":
            name = res.checkpoint_name(self._result.get(), self._train_name)
        else:
            result = self._optional(self._result)
            named = result is not None and "checkpoint" in result
            name = res.checkpoint_name(result or {}, self._train_name) if named else self._commits.get()[0].name
        return f"train/{self._train_name}/{name}"

    def _reload_checkpoint(self) -> Reloaded:
        return self._reload(f"{self._checkpoint_folder()}/{NATIVE_FILE}")

    def _recording(self) -> Any:
        return self._root.fetch(f"{self._folder}/metrics.rrd", BLOB_LIMIT)

    # The checks.

    def _owner(self) -> str:
        try:
            owner = read_object(self._root, OWNER)
        except Missing:
            raise NotApplicable("the application alone, without Lanyard, leaves no owner.json") from None
        run_key = self._run().get("run_key")
        if run_key is None:
            raise NotApplicable("neither the place nor the submission tells the run's key")
        require(compare(OWNER, {"run_key": run_key}, owner))
        return f"the root is {run_key}'s"

    def _manifest(self) -> str:
        if self._kind != "regression" and not self._root.entries(self._folder):
            raise NotApplicable("this workload exported nothing")
        return check_manifest(self._root, self._folder, EXPORTED if self._kind == "regression" else ())

    def _identity(self) -> str:
        metrics = self._metrics.own()
        problems = compare("metrics.json", {"workload": "regression"}, metrics)
        problems += res.check_identity(metrics, "metrics.json", self._run()) + journal.unknown_fields(metrics)
        require(problems)
        return f"of {', '.join(str(value) for value in self._run().values())}"

    def _order(self) -> str:
        if self._question.order is None:
            raise NotApplicable("no order was given to compare with (--expect)")
        problems = compare("the order", {"submission_id": self._question.submission}, self._question.order)
        if self._kind == "regression":
            metrics = self._metrics.get()
            ordered = self._question.ordered("workload", "recipe")
            recipe = metrics.get("recipe")
            problems += compare("recipe", ordered or {}, recipe if isinstance(recipe, dict) else {})
            expected = {name: self._question.ordered(name) for name in ("world_size", "device")}
            problems += compare("metrics.json", {k: v for k, v in expected.items() if v is not None}, metrics)
        require(problems)
        return "the run followed its order"

    def _ranks(self) -> str:
        return ev.check_ranks(self._evidence.own(), self._train_name, self._question.submission)

    def _resumed_from(self) -> str | None:
        address = self._question.ordered("resume", "checkpoint")
        return str(address).rstrip("/") if address else None

    def _restored(self) -> str:
        resumed = None if self._question.order is None else self._resumed_from() is not None
        # What another application's optimizer keeps, and how it hashes it, is its own affair.
        momentum = journal.recipe_of(self._metrics.get())["momentum"] > 0 if self._kind == "regression" else None
        return ev.check_restored(self._attempts(), resumed, momentum)

    def _restored_commits(self) -> str:
        lineage = Lineage(
            self._root,
            self._train_name,
            journal.recipe_of(self._metrics.get()) if self._kind == "regression" else None,
            self._question.order is not None,
            self._resumed_from(),
            self._question.elsewhere,
        )
        return lineage.check(self._attempts().attempts, self._commits.get())

    def _first_steps(self) -> str:
        metrics = self._metrics.get() if self._kind == "regression" else None
        if metrics is not None:
            ev.check_marks(self._attempts(), "first-step")
        return ev.check_first_steps(self._attempts(), metrics, self._final_step())

    def _versions(self) -> str:
        device = self._question.ordered("device")
        if device is None and self._kind == "regression":
            device = self._metrics.get().get("device")
        return ev.check_versions(self._attempts(), self._question.ordered("pins"), device)

    def _distinct(self, part: str, asked: bool) -> str:
        return ev.check_distinct(self._attempts(), part, asked)

    def _final(self) -> str:
        evidence = self._attempts()
        if self._kind == "regression":
            ev.check_marks(evidence, "final")
        return ev.check_final(evidence, self._final_step(), self._optional(self._result))

    def _final_step(self) -> int | None:
        if self._kind == "regression":
            steps: int | None = journal.recipe_of(self._metrics.get())["steps"]
        else:
            steps = self._question.ordered("workload", "steps") or (self._optional(self._result) or {}).get(
                "final_step"
            )
        return steps

    def _decoded_recording(self) -> str:
        return recording.check_recording(self._recording(), self._question.submission, self._metrics.get())

    def _check_result(self) -> str:
        metrics = self._optional(self._metrics) if self._kind == "regression" else None
        if self._kind != "regression" and self._optional(self._result) is None:
            raise NotApplicable("this workload exported no result.json")
        return res.check_result(self._result.own(), self._run(), metrics, self._last_attempt())

    def _check_state(self) -> str:
        reloaded = self._state.own()
        content = load_archive(self._root, f"{self._folder}/state.pt")
        return res.check_state(reloaded, content, self._result.get(), self._run())

    def _check_commit(self) -> str:
        folder = self._checkpoint_folder()
        name = folder.rsplit("/", 1)[-1]
        commits: tuple[Commit, ...] = self._commits.own()
        named = next((commit for commit in commits if commit.name == name), None)
        if named is None:
            listed = ", ".join(commit.name for commit in commits)
            raise Failed([f"{name} is not in Ray Train's commit record, which lists {listed}"])
        if named is not commits[0]:
            raise Failed([f"{name} is not the newest commit, which is {commits[0].name}"])
        return f"{name}, newest of {len(commits)} commits kept"

    def _check_checkpoint(self) -> str:
        folder = self._checkpoint_folder()
        if self._kind != "regression":
            check_loads(self._root, folder, native=False)
            return f"{folder} is whole (its contents are the workload's own)"
        checkpoint = self._checkpoint.own()
        return res.check_same_state(f"{folder}/{NATIVE_FILE}", checkpoint, self._state.get())

    def _check_kept(self) -> str:
        """Every commit loads; one of the regression's into its recipe, with the state that was reported."""
        problems: list[str] = []
        commits = self._kept()
        recipe = journal.recipe_of(self._metrics.get()) if self._kind == "regression" else None
        for commit in commits:
            folder = f"train/{self._train_name}/{commit.name}"
            try:
                if recipe is None:
                    check_loads(self._root, folder, native=False)
                else:
                    check_kept(self._root, folder, commit, recipe)
            except Failed as failed:
                problems += failed.problems
        require(problems)
        return f"{len(commits)} load" + (", equal by hash to what was reported" if recipe is not None else "")

    def _kept(self) -> list[Commit]:
        """The commits of which something is in storage; that nothing is, is the commit record's to say."""
        return [each for each in self._commits.get() if self._root.entries(f"train/{self._train_name}/{each.name}")]

    def _commit_record(self) -> str:
        seen = check_record(self._root, self._train_name)
        if self._kind == "regression":
            check_own_record(self._root, self._train_name, ev.versions(self._attempts().last).get("ray"))
        return seen

    def _commits_in_order(self) -> str:
        return check_sequence(self._commits.get(), self._attempts().attempts, journal.recipe_of(self._metrics.get()))

    def _kept_journals(self) -> str:
        attempts = self._attempts().attempts
        return check_journals(self._root, self._train_name, self._kept(), self._metrics.get(), attempts)

    def _checkpoint_journal(self) -> str:
        folder, metrics = self._checkpoint_folder(), self._metrics.get()
        kept = check_journal(self._root, folder, self._checkpoint.get().step)
        path = f"{folder}/{JOURNAL_FILE}"
        problems = compare(path, {name: metrics.get(name) for name in ("recipe", "world_size")}, kept)
        rows = {row["step"]: row for row in journal.rows_of(metrics)}
        differing = [row["step"] for row in kept["steps"] if rows.get(row["step"]) != row]
        if differing:
            problems.append(f"{path} differs from metrics.json in step {journal.spans(differing)}")
        require(problems)
        return f"{len(kept['steps'])} steps, equal to metrics.json"

    def _held_out(self) -> str:
        reloaded: dict[str, Reloaded] = {"state.pt": self._state.get(), "the checkpoint": self._checkpoint.get()}
        self._list.figures["held_out_loss_recomputed"] = reloaded["the checkpoint"].held_out_loss
        return res.check_held_out(self._metrics.get(), reloaded)

    def _figures(self) -> None:
        figures = self._list.figures
        if self._kind == "regression" and (metrics := self._optional(self._metrics)) is not None:
            rows = journal.rows_of(metrics)
            figures["steps"] = len(rows)
            figures["first_loss"] = rows[0].get("loss") if rows else None
            figures["final_loss"] = rows[-1].get("loss") if rows else None
            held_out = metrics.get("held_out")
            if isinstance(held_out, dict):
                figures["held_out_loss"] = {name: held_out.get(name) for name in ("initial_loss", "final_loss")}
        try:
            evidence = self._attempts()
        except Exception:
            return
        figures["world_size"] = evidence.world_size
        figures["attempts"] = len(evidence.attempts)
        figures["restored_steps"] = [attempt.restored_step for attempt in evidence.attempts]
        figures["distinct_devices"] = ev.distinct(evidence.last, "device")
        figures["distinct_hosts"] = ev.distinct(evidence.last, "host")
