from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from worker.settings import CHECKOUT, Settings, SettingsError, connection


def load(**values: str) -> Settings:
    return Settings.load({"TEMPORAL_CONFIG_FILE": os.devnull, **values})


def test_home_is_in_the_checkout_unless_named() -> None:
    assert load().home == CHECKOUT / ".lanyard"
    assert load(LANYARD_HOME="/somewhere/else").home == Path("/somewhere/else")


def test_what_only_a_running_worker_needs_is_asked_for_by_name() -> None:
    with pytest.raises(SettingsError, match=r"LANYARD_DEPLOYMENT is not set.*export LANYARD_DEPLOYMENT="):
        load().require_deployment()
    with pytest.raises(SettingsError, match=r"LANYARD_SECRET_FILE is not set.*export LANYARD_SECRET_FILE="):
        load().read_secret()


@pytest.mark.parametrize("name", ["-a", "a-", "A", "a_b", "a b", "a" * 33, "ä"])
def test_a_deployment_that_names_cannot_be_made_of_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"LANYARD_DEPLOYMENT"):
        load(LANYARD_DEPLOYMENT=name)


@pytest.mark.parametrize("name", ["a", "team-a", "0", "a" * 32])
def test_a_good_deployment_is_taken(name: str) -> None:
    assert load(LANYARD_DEPLOYMENT=name).require_deployment() == name


def test_a_secret_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    assert load(LANYARD_SECRET_FILE=str(path)).read_secret() == b"k" * 32


def refused(path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load(LANYARD_SECRET_FILE=str(path)).read_secret()
    assert "LANYARD_SECRET_FILE" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "kkkk" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644])
def test_a_secret_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 32)
    path.chmod(mode)
    assert f"chmod 600 {path}" in refused(path)


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_a_secret_of_a_wrong_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * size)
    path.chmod(0o600)
    assert "32 to 4096 bytes" in refused(path)


def test_a_secret_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"k" * 32)
    target.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(target)
    assert "symbolic link" in refused(link)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "not a regular file" in refused(pipe)
    directory = tmp_path / "directory"
    directory.mkdir(mode=0o700)
    assert "not a regular file" in refused(directory)
    assert "does not exist" in refused(tmp_path / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    os.chown(path, 12345, 12345)
    assert "belongs to user id 12345" in refused(path)


def test_credentials_are_known_to_be_there_and_never_shown() -> None:
    settings = load(
        AWS_ACCESS_KEY_ID="AKIACANARY",
        AWS_SECRET_ACCESS_KEY="canary-secret",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_REGION="eu-north-1",
        TEMPORAL_API_KEY="canary-api-key",
    )
    assert settings.storage.credentials == "environment"
    assert settings.storage.region == "eu-north-1"
    told = repr(settings) + settings.model_dump_json()
    assert "AKIACANARY" not in told
    assert "canary" not in told
    assert load(AWS_PROFILE="team").storage.credentials == "profile"
    assert load().storage.credentials == "none"


def test_temporal_is_configured_the_ecosystems_way(tmp_path: Path) -> None:
    profiles = tmp_path / "temporal.toml"
    profiles.write_text(
        '[profile.default]\naddress = "a:1"\nnamespace = "n"\n[profile.other]\naddress = "b:2"\napi_key = "k"\n'
    )
    values = {"TEMPORAL_CONFIG_FILE": str(profiles)}
    assert Settings.load(values).temporal_address == "a:1"
    assert Settings.load(values).temporal_namespace == "n"
    assert Settings.load({**values, "TEMPORAL_PROFILE": "other"}).temporal_address == "b:2"
    assert connection({**values, "TEMPORAL_PROFILE": "other"})["api_key"] == "k"
    assert Settings.load({**values, "TEMPORAL_ADDRESS": "c:3"}).temporal_address == "c:3"
    assert load().temporal_address == "localhost:7233"
    assert load().temporal_namespace == "default"


def test_a_broken_profile_file_is_told_by_the_settings_that_name_it(tmp_path: Path) -> None:
    profiles = tmp_path / "temporal.toml"
    profiles.write_text("this is [not toml")
    with pytest.raises(SettingsError, match="TEMPORAL_CONFIG_FILE"):
        Settings.load({"TEMPORAL_CONFIG_FILE": str(profiles)})
    with pytest.raises(SettingsError, match="TEMPORAL_PROFILE"):
        Settings.load({"TEMPORAL_CONFIG_FILE": os.devnull, "TEMPORAL_PROFILE": "nobody"})


def test_skypilot_is_used_where_its_environment_is_and_needs_no_setting_then(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o755)
    named = {"LANYARD_HOME": str(tmp_path), "LANYARD_SKYPILOT_PYTHON": str(python)}
    found = Settings.load(named).skypilot
    assert found is not None
    assert (found.python, found.home, found.endpoint, found.port) == (python, tmp_path / "skypilot", None, 0)
    remote = {"SKYPILOT_API_SERVER_ENDPOINT": "https://user:canary@sky.example.org", "LANYARD_SKYPILOT_HOME": "/x"}
    found = Settings.load({**named, **remote, "SKYPILOT_API_SERVER_LOCAL_PORT": "46999"}).skypilot
    assert found is not None
    assert (found.home, found.port) == (Path("/x"), 46_999)
    assert "canary" not in repr(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LANYARD_SKYPILOT_PYTHON", "/nowhere/python"),
        ("LANYARD_SKYPILOT_ENVIRONMENTS", "not/absolute"),
        ("LANYARD_SKYPILOT_ENVIRONMENTS", "/with a blank"),
        ("SKYPILOT_API_SERVER_ENDPOINT", "sky.example.org"),
        ("SKYPILOT_API_SERVER_LOCAL_PORT", "70000"),
        ("SKYPILOT_API_SERVER_LOCAL_PORT", "x"),
    ],
)
def test_a_setting_of_skypilot_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.load({"LANYARD_SKYPILOT_PYTHON": sys.executable, name: value})
