"""Bytes that differ are never overwritten, an upload is finished with the same bytes, and no key is in a pickle."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

from tests.trainer.test_job import ORDER
from trainer import exports, publishing, storage, synthetic
from trainer.checkpoints import Restored
from trainer.hashing import model_sha256, momentum_sha256
from trainer.job import parse
from trainer.lease import UNREADABLE
from trainer.storage import DifferingBytes, StorageError

CANARY = "canary-5d1c9f0e7a"
LOCAL = pafs.LocalFileSystem()


def test_the_filesystems_pickle_carries_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id-" + CANARY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = storage.filesystem()
    pickled = pickle.dumps(store)
    assert CANARY.encode() not in pickled
    assert pickle.loads(pickled) == store
    # Arrow's own pickle forgets the retries, and Ray's controller would give up at the first refusal.
    assert type(pickle.loads(pickled)) is storage.EnvironmentS3


@pytest.mark.parametrize("endpoint", ["ftp://host", "host:9000", f"http://user:{CANARY}@host:9000"])
def test_an_unusable_endpoint_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(StorageError, match="AWS_ENDPOINT_URL") as caught:
        storage.filesystem({"AWS_ENDPOINT_URL": endpoint})
    assert CANARY not in str(caught.value)


def test_the_same_bytes_may_be_put_again_and_others_may_not(tmp_path: Path) -> None:
    path = str(tmp_path / "object")
    assert storage.put_once(LOCAL, path, b"first") is True
    assert storage.put_once(LOCAL, path, b"first") is False
    with pytest.raises(DifferingBytes, match="nothing was overwritten"):
        storage.put_once(LOCAL, path, b"second")
    assert Path(path).read_bytes() == b"first"


def test_a_lease_that_is_not_there_and_one_that_cannot_be_read_are_told_apart(tmp_path: Path) -> None:
    assert storage.observe_lease(LOCAL, str(tmp_path)).lease is None
    custody = tmp_path / "custody"
    (custody / "lease.json").mkdir(parents=True)
    (custody / "tombstone.json").write_bytes(b"")
    seen = storage.observe_lease(LOCAL, str(tmp_path))
    assert seen.lease is UNREADABLE
    assert seen.tombstone == "present"


def trained() -> tuple[Any, Restored]:
    job = parse(json.dumps(ORDER))
    recipe = job.recipe.mapping()
    model = synthetic.build_model(recipe)
    optimizer = synthetic.build_optimizer(recipe, model)
    inputs, targets = synthetic.shard(recipe, 0, 1)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    steps = tuple(
        {
            "step": step,
            "loss": 1 / step,
            "gradient_norm": math.sqrt(step),
            "parameter_change": 0.1 / step,
            "learning_rate": 0.1,
            "samples_per_second": 1e4 + step,
            "attempt": 1,
        }
        for step in range(1, 33)
    )
    return job, Restored("checkpoint_x", 32, model.state_dict(), optimizer.state_dict(), steps, recipe, 2)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    job, restored = trained()
    attempts = [{"attempt": 1, "restored_step": 0, "ranks": [{"rank": 0}, {"rank": 1}]}]
    hashes = {"model_sha256": model_sha256(restored.model), "momentum_sha256": momentum_sha256(restored.optimizer)}
    return exports.build(job, restored, attempts, [{"rank": rank, **hashes} for rank in range(2)])


def test_the_manifest_comes_last_and_names_exactly_the_others(files: dict[str, bytes]) -> None:
    assert list(files) == ["state.pt", "metrics.json", "metrics.rrd", "result.json", "SHA256SUMS"]
    lines = files["SHA256SUMS"].decode().splitlines()
    assert dict(line.split("  ")[::-1] for line in lines) == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != "SHA256SUMS"
    }


def test_the_state_loads_without_running_code_and_hashes_as_the_result_says(files: dict[str, bytes]) -> None:
    state = torch.load(io.BytesIO(files["state.pt"]), weights_only=True)
    result = json.loads(files["result.json"])
    assert state["step"] == result["final_step"] == 32
    assert model_sha256(state["model"]) == result["parameters_sha256"]
    assert momentum_sha256(state["optimizer"]) == result["momentum_sha256"]
    assert result["checkpoint"] == "train/main/checkpoint_x"


def test_the_recording_holds_exactly_the_journals_numbers(files: dict[str, bytes], tmp_path: Path) -> None:
    import rerun.recording

    (tmp_path / "metrics.rrd").write_bytes(files["metrics.rrd"])
    recording = rerun.recording.load_recording(str(tmp_path / "metrics.rrd"))
    steps = json.loads(files["metrics.json"])["steps"]
    found: dict[str, dict[int, float]] = {}
    for chunk in recording.chunks():
        batch = chunk.to_record_batch()
        if "Scalars:scalars" not in batch.schema.names:
            continue
        values = batch.column("Scalars:scalars").to_pylist()
        series = found.setdefault(str(chunk.entity_path), {})
        for step, value in zip(batch.column("step").to_pylist(), values, strict=True):
            assert step not in series
            series[step] = value[0]
    assert recording.recording_id() == ORDER["submission_id"] if callable(recording.recording_id) else True
    assert set(found) == {f"/train/{name}" for name in exports.SERIES}
    for name in exports.SERIES:
        assert found[f"/train/{name}"] == {entry["step"]: entry[name] for entry in steps}


def test_an_interrupted_upload_is_finished_with_the_same_bytes(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(files["state.pt"])
    publishing.upload(LOCAL, str(tmp_path), files)
    publishing.upload(LOCAL, str(tmp_path), files)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_another_export_in_the_place_stays_and_is_not_sealed(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "metrics.rrd").write_bytes(b"another recording")
    with pytest.raises(DifferingBytes, match=r"metrics\.rrd"):
        publishing.upload(LOCAL, str(tmp_path), files)
    assert (tmp_path / "metrics.rrd").read_bytes() == b"another recording"
    assert not (tmp_path / "SHA256SUMS").exists()


class Flaky:
    """A store whose first writes fail after the object was stored, as a lost answer does."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(LOCAL, name)

    def open_output_stream(self, path: str) -> Any:
        stream = LOCAL.open_output_stream(path)
        if self.failures == 0:
            return stream
        self.failures -= 1

        class Lost:
            def write(self, data: bytes) -> None:
                stream.write(data)
                stream.close()
                raise OSError("the answer was lost")

        return Lost()


def test_a_lost_answer_is_looked_up_and_not_sent_twice(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.publishing.time.sleep", lambda _s: None)
    publishing.upload(Flaky(3), str(tmp_path), files)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
