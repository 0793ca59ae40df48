"""The application environment is built once, addressed by what it is made of, and verified, not trusted."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.wheels import offer, only_offered
from trainer import environment
from trainer.environment import EnvironmentBroken
from trainer.private import NotPrivate

ROOT = Path(__file__).parents[2]
LAUNCHER = "import sys; from pathlib import Path; from trainer import environment as e; "


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lock") / "requirements.txt"
    path.write_text("# nothing beyond what venv itself brings\n")
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "environments"


@pytest.fixture
def built(root: Path, lock: Path) -> Iterator[Path]:
    target = environment.ensure(root, requirements=lock)
    yield target
    environment.verify(root, requirements=lock)  # each test puts back what it changed


def changed_source(target: Path) -> Path:
    return next(target.glob("lib/python*/site-packages/pip/__init__.py"))


def test_a_second_ensure_builds_nothing(built: Path, root: Path, lock: Path) -> None:
    said: list[str] = []
    began = time.monotonic()
    assert environment.ensure(root, requirements=lock, say=said.append) == built
    assert said == []
    assert time.monotonic() - began < 5


def test_its_address_changes_with_the_lock_file(root: Path, lock: Path, tmp_path: Path) -> None:
    other = tmp_path / "requirements.txt"
    other.write_text(lock.read_text() + "six==1.17.0\n")
    assert environment.path(root, other) != environment.path(root, lock)
    with pytest.raises(EnvironmentBroken, match=r"there is no application environment .* ensure"):
        environment.verify(root, requirements=other)


def test_a_changed_file_is_named_with_the_remedy_and_not_mended_unasked(built: Path, root: Path, lock: Path) -> None:
    source = changed_source(built)
    before, status = source.read_bytes(), source.stat()
    source.write_bytes(before + b"#")
    for attempt in (environment.verify, environment.ensure):
        with pytest.raises(EnvironmentBroken, match=r"pip/__init__.py was changed.*--rebuild"):
            attempt(root, requirements=lock)
    source.write_bytes(before)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_change_of_the_same_size_is_found_too(built: Path, root: Path, lock: Path) -> None:
    source = changed_source(built)
    status = source.stat()
    os.utime(source)
    with pytest.raises(EnvironmentBroken, match="was changed"):
        environment.verify(root, requirements=lock)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("pattern", ["pip/__init__.py", "pip/__pycache__/__init__.*.pyc", "pip/py.typed"])
def test_other_bytes_of_the_same_size_and_date_are_found(built: Path, root: Path, lock: Path, pattern: str) -> None:
    changed = next(built.glob(f"lib/python*/site-packages/{pattern}"))
    before, status = changed.read_bytes(), changed.stat()

    def write(data: bytes) -> None:
        changed.write_bytes(data)
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))

    write(before[:-1] + bytes([before[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(EnvironmentBroken, match=rf"{changed.name} was changed \(its size and date .*--rebuild"):
            environment.verify(root, requirements=lock)
    write(before)


def test_bytes_are_compared_once_in_a_boot_and_after_every_touch(
    built: Path, root: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    really = environment._digests

    def digests(target: Path, names: Iterable[str]) -> dict[str, str]:
        hashed.append(target)
        return really(target, names)

    monkeypatch.setattr(environment, "_digests", digests)
    environment.verify(root, requirements=lock)
    hashed.clear()
    environment.verify(root, requirements=lock)
    assert hashed == []
    changed_source(built).chmod(0o600)  # only the change time tells
    environment.verify(root, requirements=lock)
    environment.verify(root, requirements=lock)
    assert hashed == [built]
    monkeypatch.setattr(environment, "boot_id", lambda: "another boot")
    environment.verify(root, requirements=lock)
    assert hashed == [built, built]
    changed_source(built).chmod(0o644)


def test_a_link_that_leads_elsewhere_is_found(built: Path, root: Path, lock: Path) -> None:
    link = next(each for each in (built / "bin").iterdir() if each.is_symlink())
    leads, status = os.readlink(link), link.lstat()
    link.unlink()
    link.symlink_to("/" + leads[1:].replace("n", "m"))
    os.utime(link, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
    with pytest.raises(EnvironmentBroken, match=f"{link.name} was changed"):
        environment.verify(root, requirements=lock)
    link.unlink()
    link.symlink_to(leads)
    os.utime(link, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def test_a_missing_and_an_added_file_are_found(built: Path, root: Path, lock: Path) -> None:
    source = changed_source(built)
    source.rename(built.parent / "aside")
    with pytest.raises(EnvironmentBroken, match=r"pip/__init__.py is missing"):
        environment.verify(root, requirements=lock)
    (built.parent / "aside").rename(source)


@pytest.mark.parametrize(
    "name",
    [
        *("sitecustomize.py", "added.pth", "pip/added.so", "pip/added.pyc", "pip/data.txt", "added/__init__.py"),
        *("pip/__pycache__/added.TAG.pyc", "pip/__pycache__/added.pyc", "pip/__pycache__/added.so", "added/x.pyc"),
        "pip/__pycache__/__init__.cpython-399.pyc",
    ],
)
def test_a_file_that_was_added_is_refused(built: Path, root: Path, lock: Path, name: str) -> None:
    packages = changed_source(built).parents[1]
    added = packages / name.replace("TAG", str(sys.implementation.cache_tag))
    made = not added.parent.exists()
    added.parent.mkdir(exist_ok=True)
    # The very bytes that Python would write for a source that is there.
    added.write_bytes(Path(importlib.util.cache_from_source(str(changed_source(built)))).read_bytes())
    with pytest.raises(EnvironmentBroken, match=rf"{re.escape(added.name)} was added"):
        environment.verify(root, requirements=lock)
    added.unlink()
    if made:
        added.parent.rmdir()


def test_a_cache_file_that_python_adds_changes_nothing_and_any_other_in_its_place_does(
    built: Path, root: Path, lock: Path, tmp_path: Path
) -> None:
    source = changed_source(built)
    other = tmp_path / "other.py"
    other.write_text("raise SystemExit('not what was built')\n")
    for level in (1, 2):
        cache = Path(importlib.util.cache_from_source(str(source), optimization=level))
        program = [str(environment.interpreter(built)), "-I", f"-{'O' * level}", "-c", "import pip"]
        subprocess.run(program, check=True)
        assert cache.exists()
        environment.verify(root, requirements=lock)
        honest = cache.read_bytes()
        py_compile.compile(str(other), cfile=str(tmp_path / "other.pyc"), doraise=True)
        foreign = (tmp_path / "other.pyc").read_bytes()
        for data in (honest[:16] + foreign[16:], honest[:40], b"", b"x" * 4 + honest[4:]):
            cache.write_bytes(data)
            with pytest.raises(EnvironmentBroken, match=rf"{re.escape(cache.name)} was added"):
                environment.verify(root, requirements=lock)
        for each in source.parents[1].rglob(f"*.opt-{level}.pyc"):
            each.unlink()


def test_a_file_that_others_can_write_is_refused(built: Path, root: Path, lock: Path) -> None:
    source = changed_source(built)
    source.chmod(0o666)
    with pytest.raises(EnvironmentBroken, match="can be written by others"):
        environment.verify(root, requirements=lock)
    source.chmod(0o644)


def test_an_open_environment_or_root_is_refused(built: Path, root: Path, lock: Path) -> None:
    built.chmod(0o755)
    with pytest.raises(NotPrivate, match="must be 0700"):
        environment.verify(root, requirements=lock)
    built.chmod(0o700)
    root.chmod(0o777)
    for attempt in (environment.verify, environment.ensure):
        with pytest.raises(NotPrivate, match="others can write"):
            attempt(root, requirements=lock)
    root.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's can be shared")
def test_a_shared_environment_may_be_read_by_others_and_written_by_none(built: Path, root: Path, lock: Path) -> None:
    environment.share(built)
    try:
        environment.verify(root, requirements=lock)
        modes = [each.stat().st_mode & 0o777 for each in (built, built / environment.RECORD)]
        assert modes == [0o755, 0o644]
        built.chmod(0o775)
        with pytest.raises(NotPrivate):
            environment.verify(root, requirements=lock)
    finally:
        built.chmod(0o700)
        for each in (built / environment.RECORD, built / environment.MANIFEST):
            each.chmod(0o600)


def test_a_manifest_or_record_that_was_edited_is_refused(built: Path, root: Path, lock: Path) -> None:
    for name, says in ((environment.MANIFEST, "not the one of the build"), (environment.RECORD, "cannot be read")):
        before = (built / name).read_bytes()
        (built / name).write_bytes(before[:-1] + b" ")
        with pytest.raises(EnvironmentBroken, match=says):
            environment.verify(root, requirements=lock)
        (built / name).write_bytes(before)


def test_versions_are_asked_of_the_interpreter_itself(built: Path, root: Path, lock: Path) -> None:
    before = (built / environment.RECORD).read_bytes()
    record = json.loads(before)
    record["versions"]["pip"] = "0.0.1"
    (built / environment.RECORD).write_text(json.dumps(record))
    with pytest.raises(EnvironmentBroken, match="reports another `versions`"):
        environment.verify(root, requirements=lock)
    (built / environment.RECORD).write_bytes(before)


def test_a_build_that_was_never_finished_is_refused_and_then_done_again(tmp_path: Path, lock: Path) -> None:
    target = environment.path(tmp_path, lock)
    target.mkdir(mode=0o700, parents=True)
    (target / "half").write_text("")
    with pytest.raises(EnvironmentBroken, match="never finished"):
        environment.verify(tmp_path, requirements=lock)
    said: list[str] = []
    environment.ensure(tmp_path, requirements=lock, say=said.append)
    assert said[0] == "removing an unfinished build"
    assert not (target / "half").exists()


def test_a_killed_builder_holds_up_nobody(tmp_path: Path, lock: Path) -> None:
    code = f"{LAUNCHER}e.ensure(Path(sys.argv[1]), requirements=Path(sys.argv[2]), say=lambda s: print(s, flush=True))"
    builder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(lock)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert builder.stdout is not None
    assert builder.stdout.readline().startswith(b"creating")
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    builder.stdout.close()
    assert environment.ensure(tmp_path, requirements=lock) == environment.path(tmp_path, lock)


def test_two_builders_at_once_build_once(tmp_path: Path, lock: Path) -> None:
    said: list[str] = []
    builders = [
        threading.Thread(target=environment.ensure, args=(tmp_path,), kwargs={"requirements": lock, "say": said.append})
        for _ in range(2)
    ]
    for each in builders:
        each.start()
    for each in builders:
        each.join()
    environment.verify(tmp_path, requirements=lock)
    assert sum(line.startswith("creating") for line in said) == 1
    assert "another build is under way, waiting for it" in said


def test_a_failing_installation_says_what_pip_said_and_leaves_nothing_complete(tmp_path: Path) -> None:
    wrong = tmp_path / "requirements.txt"
    wrong.write_text("lanyard-has-no-such-distribution==0.0\n")
    with pytest.raises(EnvironmentBroken, match="lanyard-has-no-such-distribution"):
        environment.ensure(tmp_path / "root", requirements=wrong)
    with pytest.raises(EnvironmentBroken, match="never finished"):
        environment.verify(tmp_path / "root", requirements=wrong)


def test_a_link_in_its_place_is_refused(tmp_path: Path, lock: Path) -> None:
    target = environment.path(tmp_path, lock)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPrivate, match="not a directory"):
        environment.ensure(tmp_path, requirements=lock)


@pytest.mark.parametrize(
    ("offered", "device", "fits"),
    [
        ("2.13.0+cpu", "cpu", True),
        ("2.13.0", "cpu", False),
        ("2.13.0+cpu", "cuda", False),
        ("2.13.0+cu130", "cuda", True),
    ],
)
def test_the_wrong_torch_build_is_refused_before_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: str, device: str, fits: bool
) -> None:
    only_offered(tmp_path, monkeypatch)
    offer(tmp_path, "torch", offered)
    lock = tmp_path / "requirements.txt"
    lock.write_text("torch==2.13.0\n")
    said: list[str] = []
    if fits:
        environment.ensure(tmp_path / "root", requirements=lock, device=device, say=said.append)
    else:
        with pytest.raises(EnvironmentBroken, match=r"torch is 2\.13\.0"):
            environment.ensure(tmp_path / "root", requirements=lock, device=device, say=said.append)
    assert any(line.startswith("Successfully") for line in said) == fits


@pytest.mark.parametrize(
    ("build", "device", "says"),
    [
        ("2.13.0+cu130", "cpu", r"PIP_EXTRA_INDEX_URL .* CPU wheels .* ensure --rebuild"),
        ("2.13.0+cpu", "cuda", r"needs a \+cu build"),
    ],
)
def test_the_wrong_torch_build_is_refused_with_the_way_to_the_right_one(build: str, device: str, says: str) -> None:
    with pytest.raises(EnvironmentBroken, match=says):
        environment.check_device({"torch": build}, device)
    environment.check_device({"torch": "2.13.0+cpu"}, "cpu")
    environment.check_device({"torch": "2.13.0+cu130"}, "cuda")


def test_the_lock_pins_everything_exactly_and_agrees_with_its_source() -> None:
    locked = environment.pins()
    lines = environment.REQUIREMENTS.with_name("requirements.in").read_text().splitlines()
    wanted = [line.partition("#")[0].strip() for line in lines if not line.startswith("#")]
    for line in wanted:
        name, _, version = line.partition("==")
        assert locked[environment.normalized(name.partition("[")[0])] == version.strip()
    assert "+" not in environment.REQUIREMENTS.read_text().split("torch==")[1].splitlines()[0]


def test_a_line_that_pins_nothing_is_refused(tmp_path: Path) -> None:
    loose = tmp_path / "requirements.txt"
    loose.write_text("six>=1\n")
    with pytest.raises(EnvironmentBroken, match="pins nothing exactly"):
        environment.pins(loose)


def test_the_command_line_says_where_and_fails_with_a_message(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer.environment", *arguments, "--root", str(tmp_path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert run("path").stdout.strip() == str(environment.path(tmp_path))
    failed = run("verify")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: there is no application environment")
