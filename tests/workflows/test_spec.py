"""run.json: what is taken, and what is refused, with which words."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.fields import format_duration, parse_duration
from workflows.spec import (
    ExistingHosts,
    RegressionWorkload,
    RunSpec,
    ScriptWorkload,
    SkyPilotHosts,
    SpecError,
    Undecodable,
    parse_run,
    run_schema,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))
CANARY = "canary-4f1d0c2b9a77"
DIGEST = "sha256:" + "0123456789abcdef" * 4
MESSAGE_MAX = 2_000

LOCAL: dict[str, Any] = {
    "name": "regression",
    "hosts": {"provider": "local", "count": 2},
    "storage": {"uri": "s3://lanyard/runs"},
    "workload": {"kind": "regression", "recipe": {"steps": 32, "checkpoint_interval": 4}},
    "drill": {"kind": "worker", "after_step": 8},
}
RENTED: dict[str, Any] = {
    **LOCAL,
    "hosts": {
        "provider": "skypilot",
        "count": 2,
        "infra": "k8s/training",
        "accelerators": "B200:1",
        "image": f"docker:pytorch/pytorch@{DIGEST}",
        "accept_licence": True,
    },
}
ATTACHED: dict[str, Any] = {
    **LOCAL,
    "hosts": {"provider": "existing", "endpoint": "http://127.0.0.1:8265", "token_file": "/run/secrets/ray-token"},
}
SCRIPT: dict[str, Any] = {
    **LOCAL,
    "workload": {
        "kind": "script",
        "working_dir": "examples/digits",
        "entrypoint": ["python", "train.py"],
        "steps": 40,
        "checkpoint_interval": 4,
    },
}
GONE = object()


def changed(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """The run.json `base` with one field set, or taken away."""
    run = copy.deepcopy(base)
    *parents, last = path.split("/")
    place = run
    for name in parents:
        place = place.setdefault(name, {})
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return run


def refusal(*inputs: object) -> str:
    """The message with which the inputs are refused."""
    with pytest.raises(SpecError) as caught:
        parse_run(inputs)
    return str(caught.value)


# What is wrong, in which run.json, the field the message has to name, and a piece of its remedy.
BAD_FIELDS: list[tuple[dict[str, Any], str, object, str, str]] = [
    # the run's name: Ray's Jobs API, Kubernetes and every provider have to take it
    (LOCAL, "name", GONE, "name", "is missing: add it"),
    (LOCAL, "name", "", "name", "1 to 40 lower-case letters"),
    (LOCAL, "name", "a" * 41, "name", "1 to 40 lower-case letters"),
    (LOCAL, "name", "Regression", "name", "lower-case"),
    (LOCAL, "name", "a/b", "name", "letters, digits and '-'"),
    (LOCAL, "name", "a b", "name", "letters, digits and '-'"),
    (LOCAL, "name", "a_b", "name", "letters, digits and '-'"),
    (LOCAL, "name", "9lives", "name", "a letter first"),
    (LOCAL, "name", "-a", "name", "a letter first"),
    (LOCAL, "name", "a-", "name", "no '-' last"),
    (LOCAL, "name", "regression\n", "name", "lower-case"),
    (LOCAL, "name", "régression", "name", "lower-case"),
    (LOCAL, "name", 7, "name", "must be text"),
    (LOCAL, "name", None, "name", "must be text"),
    # unknown fields
    (LOCAL, "nmae", "x", "nmae", "did you mean name?"),
    (LOCAL, "Drill", {}, "Drill", "did you mean drill?"),
    (LOCAL, "limit", {}, "limit", "did you mean limits?"),
    (LOCAL, "zzz", 1, "zzz", "remove it (known here: "),
    (LOCAL, "workload/recipe/step", 3, "workload.recipe.step", "did you mean steps?"),
    (LOCAL, "workload/recipe/learning-rate", 3, "workload.recipe.learning-rate", "did you mean learning_rate?"),
    (LOCAL, "storage/url", "x", "storage.url", "did you mean uri?"),
    (LOCAL, "storage/secret_key", "x", "storage.secret_key", "known here: uri"),
    (LOCAL, "hosts/infra", "nebius", "hosts.infra", '"skypilot" only: remove it'),
    (LOCAL, "hosts/require_distinct_hosts", True, "hosts.require_distinct_hosts", '"skypilot" only'),
    (LOCAL, "workload/steps", 3, "workload.steps", '"script" only'),
    (LOCAL, "drill/after_steps", 8, "drill.after_steps", "did you mean after_step?"),
    (LOCAL, "limits/lifetime", "5m", "limits.lifetime", "known here: provision, stall, run"),
    (LOCAL, "resume", {"from_": "s3://lanyard/runs/a"}, "resume.from", "is missing: add it"),
    (LOCAL, "a b\n" + "x" * 500, 1, "(an unusual name)", "is not a field of run.json"),
    # hosts
    (LOCAL, "hosts", GONE, "hosts", '{"provider": "local", "count": 2}'),
    (LOCAL, "hosts", None, "hosts", "must be a JSON object"),
    (LOCAL, "hosts", [], "hosts", "must be a JSON object"),
    (LOCAL, "hosts", "local", "hosts", "must be a JSON object"),
    (LOCAL, "hosts", {}, "hosts.provider", 'add one of "local", "skypilot", "existing"'),
    (LOCAL, "hosts/provider", "slurm", "hosts.provider", 'one of "local", "skypilot", "existing", not "slurm"'),
    (LOCAL, "hosts/provider", "Local", "hosts.provider", 'did you mean "local"?'),
    (LOCAL, "hosts/provider", None, "hosts.provider", "must be one of"),
    (LOCAL, "hosts/provider", 3, "hosts.provider", "must be one of"),
    (LOCAL, "hosts/provider", {"local": 1}, "hosts.provider", "must be one of"),
    (LOCAL, "hosts/count", 1, "hosts.count", "a guarded run is multi-node: at least 2"),
    (LOCAL, "hosts/count", 0, "hosts.count", "at least 2"),
    (LOCAL, "hosts/count", -3, "hosts.count", "not -3"),
    (LOCAL, "hosts/count", 65, "hosts.count", "must be at most 64, not 65"),
    (LOCAL, "hosts/count", "2", "hosts.count", "whole number, without quotation marks"),
    (LOCAL, "hosts/count", 2.0, "hosts.count", "without point and exponent"),
    (LOCAL, "hosts/count", True, "hosts.count", "whole number"),
    (LOCAL, "hosts/count", None, "hosts.count", "whole number"),
    (LOCAL, "hosts/device", "cuda", "hosts.device", 'must be "cpu", not "cuda"'),
    (LOCAL, "hosts/device", "tpu", "hosts.device", 'must be "cpu"'),
    (RENTED, "hosts/device", "tpu", "hosts.device", 'must be "cpu" or "cuda", not "tpu"'),
    (RENTED, "hosts/infra", GONE, "hosts.infra", "is missing: add it"),
    (RENTED, "hosts/infra", "", "hosts.infra", "slurm/cluster"),
    (RENTED, "hosts/infra", "https://cloud", "hosts.infra", "as SkyPilot names it"),
    (RENTED, "hosts/accelerators", GONE, "hosts.accelerators", 'needed for device "cuda", for example "B200:1"'),
    (RENTED, "hosts/accelerators", "B200", "hosts.accelerators", "one accelerator a host"),
    (RENTED, "hosts/accelerators", "B200:8", "hosts.accelerators", "one training worker with one GPU"),
    (RENTED, "hosts/accelerators", {"B200": 1}, "hosts.accelerators", "must be text"),
    (RENTED, "hosts/device", "cpu", "hosts.accelerators", 'set device to "cuda"'),
    (RENTED, "hosts/accept_licence", GONE, "hosts.accept_licence", "read NVIDIA's EULA"),
    (RENTED, "hosts/accept_licence", False, "hosts.accept_licence", "must be true for a cuda image"),
    (RENTED, "hosts/accept_licence", "yes", "hosts.accept_licence", "true or false, without quotation marks"),
    (RENTED, "hosts/image", "docker:pytorch/pytorch:latest", "hosts.image", "pinned by digest"),
    (RENTED, "hosts/image", "pytorch/pytorch@" + DIGEST, "hosts.image", "docker:<repository>@sha256:"),
    (RENTED, "hosts/image", "docker:pytorch/pytorch@" + DIGEST[:-1], "hosts.image", "64 hexadecimal digits"),
    (RENTED, "hosts/image", "docker:u:pw@registry/x@" + DIGEST, "hosts.image", "pinned by digest"),
    (RENTED, "hosts/image", "docker:" + "x" * 600 + "@" + DIGEST, "hosts.image", "at most 512 characters"),
    (RENTED, "hosts/cpus", 16, "hosts.cpus", "must be text in quotation marks"),
    (RENTED, "hosts/cpus", "many", "hosts.cpus", '"16+" for that many or more'),
    (RENTED, "hosts/memory", "64GB", "hosts.memory", "whole number"),
    (ATTACHED, "hosts/endpoint", GONE, "hosts.endpoint", "is missing: add it"),
    (ATTACHED, "hosts/endpoint", "http://ray.example.org:8265", "hosts.endpoint", "https unless it is on loopback"),
    (ATTACHED, "hosts/endpoint", "ray://127.0.0.1:10001", "hosts.endpoint", "write https://host:port"),
    (ATTACHED, "hosts/endpoint", "https://u:pw@host", "hosts.endpoint", "name it in token_file"),
    (ATTACHED, "hosts/endpoint", "https://host/?token=x", "hosts.endpoint", "without path, query or fragment"),
    (ATTACHED, "hosts/endpoint", "https://host:99999", "hosts.endpoint", "is not an address"),
    (ATTACHED, "hosts/endpoint", "https://[::1", "hosts.endpoint", "is not an address"),
    (ATTACHED, "hosts/endpoint", "https://", "hosts.endpoint", "is not an address"),
    (ATTACHED, "hosts/endpoint", "127.0.0.1:8265", "hosts.endpoint", "is not an address"),
    (ATTACHED, "hosts/token_file", GONE, "hosts.token_file", "is missing: add it"),
    (ATTACHED, "hosts/token_file", "token", "hosts.token_file", "an absolute path"),
    (ATTACHED, "hosts/token_file", "/a/../b", "hosts.token_file", "no '..' part"),
    # storage
    (LOCAL, "storage", GONE, "storage", '{"uri": "s3://lanyard/runs"}'),
    (LOCAL, "storage", "s3://lanyard/runs", "storage", "must be a JSON object"),
    (LOCAL, "storage", {}, "storage.uri", "is missing: add it"),
    (LOCAL, "storage/uri", 5, "storage.uri", "must be text"),
    (LOCAL, "storage/uri", "", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", "gs://bucket/prefix", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", "https://bucket.s3.amazonaws.com/p", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", "/srv/runs", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", "S3://bucket/prefix", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", " s3://bucket/prefix", "storage.uri", "must start with s3://"),
    (LOCAL, "storage/uri", "s3://key:secret@bucket/prefix", "storage.uri", "no credentials"),
    (LOCAL, "storage/uri", "s3://host:9000/bucket/prefix", "storage.uri", "AWS_ENDPOINT_URL"),
    (LOCAL, "storage/uri", "s3://bucket/prefix?versionId=1", "storage.uri", "no query"),
    (LOCAL, "storage/uri", "s3://bucket/prefix#part", "storage.uri", "no fragment"),
    (LOCAL, "storage/uri", "s3://bucket", "storage.uri", "must name a prefix"),
    (LOCAL, "storage/uri", "s3://bucket/", "storage.uri", "must name a prefix"),
    (LOCAL, "storage/uri", "s3:///prefix", "storage.uri", "must name a bucket"),
    (LOCAL, "storage/uri", "s3://Bucket/prefix", "storage.uri", "3 to 63 lower-case letters"),
    (LOCAL, "storage/uri", "s3://ab/prefix", "storage.uri", "3 to 63 lower-case letters"),
    (LOCAL, "storage/uri", "s3://a_bucket/prefix", "storage.uri", "3 to 63 lower-case letters"),
    (LOCAL, "storage/uri", "s3://a..b/prefix", "storage.uri", "must name a bucket"),
    (LOCAL, "storage/uri", "s3://192.168.0.1/prefix", "storage.uri", "must name a bucket"),
    (LOCAL, "storage/uri", "s3://bucket/a/../b", "storage.uri", "no '.' or '..' part"),
    (LOCAL, "storage/uri", "s3://bucket/./a", "storage.uri", "no '.' or '..' part"),
    (LOCAL, "storage/uri", "s3://bucket/a//b", "storage.uri", "doubled or trailing '/'"),
    (LOCAL, "storage/uri", "s3://bucket/a/", "storage.uri", "doubled or trailing '/'"),
    (LOCAL, "storage/uri", "s3://bucket//a", "storage.uri", "doubled or trailing '/'"),
    (LOCAL, "storage/uri", "s3://bucket/a b", "storage.uri", "letters, digits"),
    (LOCAL, "storage/uri", "s3://bucket/a%2e%2e/b", "storage.uri", "letters, digits"),
    (LOCAL, "storage/uri", "s3://bucket/a\n", "storage.uri", "letters, digits"),
    (LOCAL, "storage/uri", "s3://bucket/a\\b", "storage.uri", "letters, digits"),
    (LOCAL, "storage/uri", "s3://bucket/" + "a" * 201, "storage.uri", "at most 200 between"),
    (LOCAL, "storage/uri", "s3://bucket/" + "a/" * 300 + "b", "storage.uri", "at most 512 characters"),
    # the recipe
    (LOCAL, "workload", GONE, "workload", "is missing: add it"),
    (LOCAL, "workload/kind", GONE, "workload.kind", 'add one of "regression", "script"'),
    (LOCAL, "workload/kind", "regresion", "workload.kind", 'did you mean "regression"?'),
    (LOCAL, "workload/recipe", [32], "workload.recipe", "must be a JSON object"),
    (LOCAL, "workload/recipe/steps", 1, "workload.recipe.steps", "must be at least 2, not 1"),
    (LOCAL, "workload/recipe/steps", 1_000_001, "workload.recipe.steps", "must be at most 1000000"),
    (LOCAL, "workload/recipe/steps", 10**400, "workload.recipe.steps", "must be at most 1000000"),
    (LOCAL, "workload/recipe/steps", 32.5, "workload.recipe.steps", "must be a whole number"),
    (LOCAL, "workload/recipe/steps", "32", "workload.recipe.steps", "without quotation marks"),
    (LOCAL, "workload/recipe/steps", [32], "workload.recipe.steps", "must be a whole number"),
    (LOCAL, "workload/recipe/samples_per_rank", 0, "workload.recipe.samples_per_rank", "at least 1"),
    (LOCAL, "workload/recipe/samples_per_rank", 10**7 + 1, "workload.recipe.samples_per_rank", "at most 10000000"),
    (LOCAL, "workload/recipe/samples_per_rank", 64, "workload.recipe.batch_size", "at most samples_per_rank (64)"),
    (LOCAL, "workload/recipe/batch_size", 0, "workload.recipe.batch_size", "at least 1"),
    (LOCAL, "workload/recipe/batch_size", 2048, "workload.recipe.batch_size", "at most samples_per_rank (1024)"),
    (LOCAL, "workload/recipe/checkpoint_interval", 0, "workload.recipe.checkpoint_interval", "at least 1"),
    (LOCAL, "workload/recipe/checkpoint_interval", 33, "workload.recipe.checkpoint_interval", "at most steps (32)"),
    (LOCAL, "workload/recipe/learning_rate", 0, "workload.recipe.learning_rate", "must be above 0"),
    (LOCAL, "workload/recipe/learning_rate", -0.1, "workload.recipe.learning_rate", "not -0.1"),
    (LOCAL, "workload/recipe/learning_rate", 11, "workload.recipe.learning_rate", "must be at most 10"),
    (LOCAL, "workload/recipe/learning_rate", "0.1", "workload.recipe.learning_rate", "must be a number"),
    (LOCAL, "workload/recipe/learning_rate", float("nan"), "workload.recipe.learning_rate", "finite"),
    (LOCAL, "workload/recipe/learning_rate", float("inf"), "workload.recipe.learning_rate", "finite"),
    (LOCAL, "workload/recipe/momentum", 0, "workload.recipe.momentum", "must be above 0"),
    (LOCAL, "workload/recipe/momentum", 1, "workload.recipe.momentum", "must be at most 0.9999"),
    (LOCAL, "workload/recipe/features", 4097, "workload.recipe.features", "must be at most 4096"),
    (LOCAL, "workload/recipe/seed", -1, "workload.recipe.seed", "must be at least 0"),
    (LOCAL, "workload/recipe/seed", 2**31, "workload.recipe.seed", "must be at most 2147483647"),
    # the script
    (SCRIPT, "workload/working_dir", GONE, "workload.working_dir", "is missing: add it"),
    (SCRIPT, "workload/working_dir", "", "workload.working_dir", "must be a path"),
    (SCRIPT, "workload/working_dir", "../other", "workload.working_dir", "no '..' part"),
    (SCRIPT, "workload/working_dir", "~/app", "workload.working_dir", "spelled out"),
    (SCRIPT, "workload/working_dir", "https://u:pw@host/app.zip", "workload.working_dir", "not an address"),
    (SCRIPT, "workload/working_dir", "a\x00b", "workload.working_dir", "printable characters"),
    (SCRIPT, "workload/entrypoint", GONE, "workload.entrypoint", "is missing: add it"),
    (SCRIPT, "workload/entrypoint", [], "workload.entrypoint", "must name a program"),
    (SCRIPT, "workload/entrypoint", "  ", "workload.entrypoint", "must name a program"),
    (SCRIPT, "workload/entrypoint", ["python", 3], "workload.entrypoint", "must be a list of arguments"),
    (SCRIPT, "workload/entrypoint", {"program": "python"}, "workload.entrypoint", "must be a list of arguments"),
    (SCRIPT, "workload/entrypoint", "python a.py && rm x", "workload.entrypoint", '["bash", "-c", "..."]'),
    (SCRIPT, "workload/entrypoint", "python 'a.py", "workload.entrypoint", "quotation that does not end"),
    (SCRIPT, "workload/entrypoint", ["a"] * 65, "workload.entrypoint", "at most 64 arguments"),
    (SCRIPT, "workload/entrypoint", ["a", "x" * 5000], "workload.entrypoint", "4096 characters"),
    (SCRIPT, "workload/entrypoint", ["a", "\x00"], "workload.entrypoint", "NUL"),
    (SCRIPT, "workload/entrypoint", ["a", "--db=pg://u:pw@host/x"], "workload.entrypoint", "no credentials"),
    (SCRIPT, "workload/entrypoint", ["a", "AKIA" + "A" * 16], "workload.entrypoint", "no credentials"),
    (SCRIPT, "workload/steps", GONE, "workload.steps", "is missing: add it"),
    (SCRIPT, "workload/checkpoint_interval", 41, "workload.checkpoint_interval", "must be at most steps (40)"),
    (SCRIPT, "workload/steps", 900_000, "workload.checkpoint_interval", "must be at least 450 for 900000 steps"),
    (SCRIPT, "workload/recipe", {}, "workload.recipe", '"regression" only'),
    (SCRIPT, "parity", True, "parity", '"regression" workload only'),
    # the drill
    (LOCAL, "drill", True, "drill", "must be a JSON object"),
    (LOCAL, "drill", {}, "drill.after_step", "is missing: add it"),
    (LOCAL, "drill/kind", "host", "drill.kind", 'not supported yet on this version: use "worker"'),
    (LOCAL, "drill/kind", "driver", "drill.kind", "not supported yet on this version"),
    (LOCAL, "drill/kind", "preemption", "drill.kind", "not supported yet on this version"),
    (LOCAL, "drill/kind", "meteor", "drill.kind", 'must be "worker"'),
    (LOCAL, "drill/after_step", 0, "drill.after_step", "must be at least 1"),
    (LOCAL, "drill/after_step", 9, "drill.after_step", "a multiple of checkpoint_interval (4), not 9: such as 8"),
    (LOCAL, "drill/after_step", 3, "drill.after_step", "a multiple of checkpoint_interval (4), not 3: such as 4"),
    (LOCAL, "drill/after_step", 32, "drill.after_step", "must be at most 28, not 32"),
    (LOCAL, "drill/after_step", 29, "drill.after_step", "must be at most 28"),
    (LOCAL, "drill/after_step", 4_000, "drill.after_step", "a later commit can prove recovery"),
    (LOCAL, "drill/after_step", "8", "drill.after_step", "without quotation marks"),
    (SCRIPT, "drill/after_step", 40, "drill.after_step", "must be at most 36"),
    (LOCAL, "workload/recipe/checkpoint_interval", 32, "drill", "needs a run of two commits"),
    # parity
    (LOCAL, "parity", "yes", "parity", "true or false"),
    (LOCAL, "parity", 1, "parity", "true or false"),
    # limits
    (LOCAL, "limits", "60m", "limits", "must be a JSON object"),
    (LOCAL, "limits/budget", 0, "limits.budget", "must be above 0"),
    (LOCAL, "limits/budget", -1, "limits.budget", "must be above 0"),
    (LOCAL, "limits/budget", "40", "limits.budget", "without quotation marks"),
    (LOCAL, "limits/budget", True, "limits.budget", "must be a number"),
    (LOCAL, "limits/budget", 1e9, "limits.budget", "must be at most 1000000"),
    (LOCAL, "limits/budget", float("nan"), "limits.budget", "a finite number"),
    (LOCAL, "limits/run", 3600, "limits.run", "text with its unit"),
    (LOCAL, "limits/run", None, "limits.run", "text with its unit"),
    (LOCAL, "limits/run", True, "limits.run", "text with its unit"),
    (LOCAL, "limits/run", "", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "60", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "1.5h", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "60 m", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "30m1h", "limits.run", "in this order"),
    (LOCAL, "limits/run", "-5m", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "PT1H", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "6٣m", "limits.run", "is not a duration"),
    (LOCAL, "limits/run", "29s", "limits.run", 'between "30s" and "30d"'),
    (LOCAL, "limits/run", "31d", "limits.run", 'between "30s" and "30d"'),
    (LOCAL, "limits/run", "9" * 5_000 + "d", "limits.run", "is not a duration"),
    (LOCAL, "limits/provision", "0s", "limits.provision", 'between "10s" and "6h"'),
    (LOCAL, "limits/stall", "7h", "limits.stall", 'between "10s" and "6h"'),
    (LOCAL, "limits/stall", "2h", "limits.stall", "must be at most limits.run"),
    (LOCAL, "limits/teardown", "1s", "limits.teardown", 'between "30s" and "6h"'),
    (LOCAL, "limits/lease", "1m59s", "limits.lease", 'between "2m" and "24h"'),
    (LOCAL, "limits/lease", "24h1s", "limits.lease", 'between "2m" and "24h"'),
    # resume
    (LOCAL, "resume", "s3://lanyard/runs/a", "resume", "must be a JSON object"),
    (LOCAL, "resume", {}, "resume.from", "is missing: add it"),
    (LOCAL, "resume/from", "file:///runs/a", "resume.from", "must start with s3://"),
    (LOCAL, "resume/from", "s3://k:s@bucket/a", "resume.from", "no credentials"),
    (LOCAL, "resume/from", "s3://bucket", "resume.from", "must name a prefix"),
    # what an editor adds
    (LOCAL, "$schema", 5, "$schema", "must be text"),
]


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "remedy"),
    BAD_FIELDS,
    ids=[f"{number}-{case[3]}" for number, case in enumerate(BAD_FIELDS)],
)
def test_a_bad_field_is_refused_by_name_with_its_remedy(
    base: dict[str, Any], path: str, value: object, field: str, remedy: str
) -> None:
    message = refusal(changed(base, path, value))
    problems = [re.sub(r"^(- |run\.json is refused: )", "", line) for line in message.splitlines()]
    assert any(problem.startswith(f"{field} ") for problem in problems), message
    assert remedy in message
    assert len(message) <= MESSAGE_MAX


BAD_INPUTS: list[tuple[tuple[object, ...], str]] = [
    ((), "no input was given; exactly one is needed"),
    ((LOCAL, LOCAL), "2 inputs were given; exactly one is needed"),
    ((LOCAL, None, 3), "3 inputs were given"),
    ((None,), "the input is null"),
    ((True,), "the input is true or false"),
    ((7,), "the input is a number"),
    ((float("nan"),), "the input is a number"),
    ((json.dumps(LOCAL),), "the input is text (JSON inside quotation marks is text"),
    ((b"{}",), "the input is raw bytes"),
    (([LOCAL],), "the input is a list"),
    ((object(),), "the input is neither JSON nor bytes"),
    ((Undecodable("binary/encrypted", "this encoding is not known here"),), 'of encoding "binary/encrypted"'),
    ((Undecodable("x" * 5_000, "y" * 5_000),), "cannot be decoded"),
    ((Undecodable('"\n\x1b[31m', "z"),), 'of encoding "'),
]


@pytest.mark.parametrize(("inputs", "problem"), BAD_INPUTS, ids=[problem for _, problem in BAD_INPUTS])
def test_anything_but_one_json_object_is_refused_with_the_command_to_use(
    inputs: tuple[object, ...], problem: str
) -> None:
    message = refusal(*inputs)
    assert problem in message
    assert "temporal workflow start --type GuardedTrain" in message
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) <= MESSAGE_MAX


def test_a_class_of_the_same_name_from_another_copy_of_the_module_is_understood() -> None:
    # The workflow sandbox may have its own copy of the module that defines it.
    other = type("Undecodable", (), {"encoding": "x/y", "why": "unknown"})
    assert 'of encoding "x/y", cannot be decoded: unknown' in refusal(other())


def test_parity_without_a_drill_is_refused() -> None:
    assert "parity compares a drilled run" in refusal(changed(changed(LOCAL, "drill", GONE), "parity", True))


def test_a_recipe_too_large_for_a_host_is_refused() -> None:
    recipe = {"samples_per_rank": 1_000_000, "features": 4_096}
    message = refusal(changed(LOCAL, "workload/recipe", recipe))
    assert "workload.recipe.samples_per_rank times features" in message


def test_several_problems_come_in_one_message_and_the_rest_are_counted() -> None:
    message = refusal({f"unknown-{number}": number for number in range(100)})
    lines = message.splitlines()
    assert lines[0] == "run.json is refused for 104 reasons:"
    assert len(lines) == 1 + 5 + 1
    assert lines[-1] == "- and 99 more"


def test_a_hundred_thousand_problems_are_told_within_a_workflow_tasks_time() -> None:
    # The SDK takes a workflow task that does not yield for 2 s for a deadlock, and retries it for ever.
    message = refusal({f"k{number}": number for number in range(100_000)})
    assert message.startswith("run.json is refused for 100004 reasons")


@pytest.mark.parametrize(
    "run",
    [
        changed(LOCAL, "storage/uri", f"s3://user:{CANARY}@bucket/prefix"),
        changed(LOCAL, "storage/uri", f"s3://bucket/prefix?X-Amz-Signature={CANARY}"),
        changed(LOCAL, "resume/from", f"https://{CANARY}"),
        changed(LOCAL, "api_key", CANARY),
        changed(LOCAL, "storage/secret", {"deeper": CANARY}),
        changed(LOCAL, "name", f"{CANARY}/"),
        changed(LOCAL, "hosts/provider", CANARY),
        changed(LOCAL, "hosts/count", CANARY),
        changed(LOCAL, "hosts", CANARY),
        changed(LOCAL, "hosts/device", CANARY),
        changed(LOCAL, "workload/kind", CANARY),
        changed(LOCAL, "drill/kind", CANARY),
        changed(LOCAL, "limits/run", CANARY),
        changed(RENTED, "hosts/image", f"docker:me:{CANARY}@registry/image"),
        changed(ATTACHED, "hosts/endpoint", f"https://me:{CANARY}@host"),
        changed(ATTACHED, "hosts/token_file", f"{CANARY}"),
        changed(SCRIPT, "workload/entrypoint", ["python", f"--url=https://me:{CANARY}@host"]),
        changed(SCRIPT, "workload/entrypoint", f"TOKEN={CANARY} python; ls"),
        changed(SCRIPT, "workload/working_dir", f"https://me:{CANARY}@host"),
    ],
)
def test_a_secret_in_a_refused_value_is_not_repeated(run: dict[str, Any]) -> None:
    assert CANARY not in refusal(run)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=60)
    | st.just(f"s3://u:{CANARY}@bucket/p"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=50), inner, max_size=4),
    max_leaves=12,
)
paths = st.sampled_from(sorted({case[1] for case in BAD_FIELDS}))


@given(st.lists(json_values, max_size=3))
def test_any_input_is_taken_or_refused_with_a_bounded_message(inputs: list[object]) -> None:
    message = refusal(*inputs)
    assert len(message) <= MESSAGE_MAX
    assert CANARY not in message


@given(st.sampled_from([LOCAL, RENTED, ATTACHED, SCRIPT]), paths, json_values)
def test_any_value_of_any_field_is_taken_or_refused_with_a_bounded_message(
    base: dict[str, Any], path: str, value: object
) -> None:
    run = changed(base, path, value)
    try:
        spec = parse_run((run,))
    except SpecError:
        message = refusal(run)
        assert len(message) <= MESSAGE_MAX
        assert CANARY not in message
    else:
        assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


GOOD: list[tuple[dict[str, Any], str, object]] = [
    (LOCAL, "name", "a"),
    (LOCAL, "name", "a" * 40),
    (LOCAL, "name", "run-2026-11-30"),
    (LOCAL, "hosts/count", 64),
    (LOCAL, "storage/uri", "s3://my.bucket-1/a/b_c=d/2026.11"),
    (LOCAL, "workload", {"kind": "regression"}),
    (LOCAL, "workload/recipe/learning_rate", 1),
    (LOCAL, "drill", None),
    (LOCAL, "drill", {"after_step": 28}),
    (LOCAL, "parity", True),
    (LOCAL, "limits", {}),
    (LOCAL, "limits", {"run": "30d", "stall": "10s", "lease": "2m", "teardown": "1h30m", "provision": "90s"}),
    (LOCAL, "resume/from", "s3://lanyard/runs/regression-0123456789"),
    (LOCAL, "$schema", "../schema/run.schema.json"),
    (RENTED, "hosts/image", f"docker:ghcr.io:443/a/b_c:1.0@{DIGEST}"),
    (RENTED, "hosts/infra", "slurm/training"),
    (RENTED, "hosts/infra", "aws/us-east-1/us-east-1a"),
    (RENTED, "hosts/infra", "k8s/arn:aws:eks:us-east-1:123456789012:cluster/gpu"),
    (RENTED, "hosts/memory", "64+"),
    (RENTED, "hosts", {"provider": "skypilot", "infra": "slurm/training", "device": "cpu"}),
    (ATTACHED, "hosts/endpoint", "http://localhost:8265/"),
    (ATTACHED, "hosts/endpoint", "http://[::1]:8265"),
    (ATTACHED, "hosts/endpoint", "https://ray.example.org"),
    (ATTACHED, "hosts/token_file", "/run/secrets/token"),
    (SCRIPT, "workload/working_dir", "/srv/apps/digits"),
    (SCRIPT, "workload/entrypoint", ["bash", "-c", "python a.py && python b.py"]),
    (SCRIPT, "workload/entrypoint", "python 'my app.py' --epochs=3"),
]


@pytest.mark.parametrize(("base", "path", "value"), GOOD, ids=[f"{case[1]}-{i}" for i, case in enumerate(GOOD)])
def test_a_good_run_is_taken_and_survives_the_way_to_an_activity(
    base: dict[str, Any], path: str, value: object
) -> None:
    spec = parse_run((changed(base, path, value),))
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_the_defaults_are_those_of_the_design() -> None:
    spec = parse_run(({**LOCAL, "workload": {"kind": "regression"}},))
    assert isinstance(spec.workload, RegressionWorkload)
    assert spec.workload.recipe.model_dump() == {
        "steps": 32,
        "samples_per_rank": 1_024,
        "checkpoint_interval": 4,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "features": 16,
        "batch_size": 128,
        "seed": 7,
    }
    assert spec.limits.model_dump(mode="json") == {
        "provision": "20m",
        "stall": "5m",
        "run": "1h",
        "teardown": "15m",
        "lease": "1h",
        "budget": None,
    }
    assert (spec.limits.provision, spec.limits.run) == (1_200, 3_600)
    assert spec.parity is False
    assert spec.resume is None


def test_the_pins_name_the_torch_build_of_the_profile() -> None:
    common = {"ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0"}
    assert parse_run((LOCAL,)).pins() == {"torch": "2.13.0+cpu", **common}
    assert parse_run((RENTED,)).pins() == {"torch": "2.13.0+cu130", **common}


def test_only_rented_hosts_must_be_distinct_by_default() -> None:
    assert parse_run((RENTED,)).hosts.require_distinct_hosts
    assert parse_run((RENTED,)).hosts.require_distinct_devices
    assert not parse_run((LOCAL,)).hosts.require_distinct_hosts
    assert not parse_run((ATTACHED,)).hosts.require_distinct_hosts


def test_both_workloads_tell_their_length_and_their_commits() -> None:
    for base, steps in ((LOCAL, 32), (SCRIPT, 40)):
        workload = parse_run((base,)).workload
        assert (workload.total_steps, workload.commit_interval) == (steps, 4)


def test_an_entrypoint_is_one_list_of_arguments_however_it_is_written() -> None:
    for written in (["python", "my app.py"], "python 'my app.py'"):
        workload = parse_run((changed(SCRIPT, "workload/entrypoint", written),)).workload
        assert isinstance(workload, ScriptWorkload)
        assert workload.entrypoint == ("python", "my app.py")


def test_a_spec_cannot_be_changed() -> None:
    spec = parse_run((LOCAL,))
    with pytest.raises(ValueError, match="frozen"):
        spec.parity = True


@given(st.integers(min_value=1, max_value=10**9))
def test_a_duration_reads_back_as_the_same_seconds(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_good_runs(example: Path) -> None:
    parse_run((json.loads(example.read_text()),))


def test_the_example_for_rented_hosts_is_the_two_host_b200_profile() -> None:
    spec = parse_run((json.loads((ROOT / "examples/b200x2.json").read_text()),))
    assert isinstance(spec.hosts, SkyPilotHosts)
    assert (spec.hosts.count, spec.hosts.accelerators, spec.hosts.device) == (2, "B200:1", "cuda")
    assert spec.hosts.require_distinct_hosts
    assert spec.hosts.require_distinct_devices
    assert spec.hosts.accept_licence
    assert "@sha256:" in (spec.hosts.image or "")


def test_existing_hosts_keep_their_endpoint_without_a_trailing_slash() -> None:
    hosts = parse_run((changed(ATTACHED, "hosts/endpoint", "http://127.0.0.1:8265/"),)).hosts
    assert isinstance(hosts, ExistingHosts)
    assert hosts.endpoint == "http://127.0.0.1:8265"


# The schema ------------------------------------------------------------------------------------


def test_the_schema_that_ships_is_current() -> None:
    text = json.dumps(run_schema(), indent=2, ensure_ascii=False) + "\n"
    assert (ROOT / "schema/run.schema.json").read_text() == text, "run `make schema`"


def test_every_field_of_the_schema_has_a_description_and_an_example() -> None:
    for model in [run_schema(), *run_schema()["$defs"].values()]:
        for name, field in model["properties"].items():
            assert field.get("description"), name
            assert field.get("examples"), name


def test_every_example_in_the_schema_is_a_value_of_its_field() -> None:
    validator = schema_validator()
    for model in [run_schema(), *run_schema()["$defs"].values()]:
        for name, field in model["properties"].items():
            for example in field["examples"]:
                problems = list(validator.evolve(schema={**field, "$defs": run_schema()["$defs"]}).iter_errors(example))
                assert not problems, (name, example, problems)


def schema_validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(run_schema())
    return jsonschema.Draft202012Validator(run_schema())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_editor_finds_nothing_wrong_in_the_examples(example: Path) -> None:
    told = json.loads(example.read_text())
    assert (example.parent / told["$schema"]).resolve() == ROOT / "schema/run.schema.json"
    assert not list(schema_validator().iter_errors(told))


def test_what_the_code_takes_the_schema_takes_too() -> None:
    validator = schema_validator()
    for base, path, value in GOOD:
        run = changed(base, path, value)
        assert not list(validator.iter_errors(run)), (path, value)


def test_the_schema_refuses_what_it_can_express() -> None:
    validator = schema_validator()
    for base, path, value in (
        (LOCAL, "hosts/count", 1),
        (LOCAL, "nmae", "x"),
        (LOCAL, "name", "A"),
        (LOCAL, "storage/uri", "s3://bucket"),
        (LOCAL, "limits/run", 60),
        (LOCAL, "workload/kind", "other"),
        (RENTED, "hosts/image", "docker:pytorch/pytorch:latest"),
    ):
        assert list(validator.iter_errors(changed(base, path, value))), (path, value)
