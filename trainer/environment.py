"""The application's environment: built once per machine, addressed by what it is made of, verified at each start.

    python -m trainer.environment ensure|verify|path [--root DIR] [--rebuild]

It lies under ``--root``, else ``$LANYARD_ENVIRONMENTS``, else ``${XDG_CACHE_HOME:-~/.cache}/lanyard/environments``, in
a directory named by the hash of ``requirements.txt`` and of the interpreter (version, ABI, platform). Standard library
only, because it runs before the environment exists.

A virtual environment's scripts hold absolute paths, so it is built at its final path, under a lock; a `complete`
record, written last, is what makes it one. A build that was killed has none and is done again. Verification compares
every file's size and modification time with a manifest taken at the build, and then asks that interpreter for the
versions it really has. (It finds damage and changes by hand, not a forger who has our own rights.)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.private import NotPrivate, check_parents, check_private_directory, write_private_file

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RECORD = "complete.json"
MANIFEST = "manifest.json"
DISTRIBUTIONS = "ray", "torch", "rerun-sdk", "pillow", "pyarrow"
"""The distributions whose versions a host states in its receipt."""
LOCK_WAIT_S = 1800.0

Say = Callable[[str], None]


class EnvironmentBroken(Exception):
    """The environment is missing, incomplete or not what was built. The message says what and how to mend it."""


def default_root() -> Path:
    """Where environments lie unless told otherwise."""
    if configured := os.environ.get("LANYARD_ENVIRONMENTS"):
        return Path(configured)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "lanyard" / "environments"


def requirements_hash(requirements: Path = REQUIREMENTS) -> str:
    """SHA-256 (hex) of the lock file together with the interpreter it is installed for."""
    interpreter = [sys.implementation.name, sys.version.split()[0], str(sysconfig.get_config_var("SOABI"))]
    parts = [*interpreter, sysconfig.get_platform(), hashlib.sha256(requirements.read_bytes()).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def path(root: Path | None = None, requirements: Path = REQUIREMENTS) -> Path:
    """Where the environment is, or would be."""
    return (root or default_root()).expanduser().absolute() / requirements_hash(requirements)[:24]


def interpreter(environment: Path) -> Path:
    """The environment's Python."""
    return environment / "bin" / "python"


def ensure(
    root: Path | None = None,
    *,
    requirements: Path = REQUIREMENTS,
    rebuild: bool = False,
    say: Say = lambda line: None,
) -> Path:
    """Verify the environment, building it first if it is not there (or ``rebuild``); return its directory.

    Two builders do not collide: the second waits for the first, at most half an hour. Raises EnvironmentBroken, or
    NotPrivate when others can write where it lies. A complete environment that fails verification is *not* rebuilt
    unasked: what changed it is for a person to know.
    """
    target = path(root, requirements)
    _make_root(target.parent)
    if not rebuild and (target / RECORD).exists():
        verify(root, requirements=requirements)
        return target
    with _locked(target, say):
        complete = (target / RECORD).exists()
        if complete and not rebuild:
            # The build that was waited for.
            verify(root, requirements=requirements)
            return target
        if os.path.lexists(target):
            say("removing " + ("the environment" if complete else "an unfinished build"))
            _remove(target)
        _build(target, requirements, say)
    verify(root, requirements=requirements)
    return target


def verify(root: Path | None = None, *, requirements: Path = REQUIREMENTS) -> dict[str, Any]:
    """Prove that the environment is complete and unchanged, and return its record.

    The record: ``versions`` (name to version of every distribution), ``torch`` (full build, as ``2.13.0+cpu``),
    ``freeze_sha256``, ``requirements_hash``, ``python``. Raises EnvironmentBroken or NotPrivate.
    """
    target = path(root, requirements)
    remedy = "`make application`, or `python -m trainer.environment ensure`"
    if not os.path.lexists(target):
        raise EnvironmentBroken(f"there is no application environment at {target}; build it with {remedy}")
    check_private_directory(target)
    try:
        record: dict[str, Any] = json.loads((target / RECORD).read_bytes())
        manifest_bytes = (target / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise EnvironmentBroken(f"the build of {target} was never finished; finish it with {remedy}") from error
    except ValueError as error:
        raise _changed(target, f"its record cannot be read ({error})") from error
    if hashlib.sha256(manifest_bytes).hexdigest() != record.get("manifest_sha256"):
        raise _changed(target, f"{MANIFEST} is not the one of the build")
    _compare(target, json.loads(manifest_bytes), _walk(target))
    found = _ask_interpreter(target)
    wanted = pins(requirements)
    for name, version in wanted.items():
        have = found["versions"].get(name)
        if have is None or have.partition("+")[0] != version:
            raise _changed(target, f"{name} is {have or 'missing'}, the lock says {version}")
    for key in ("versions", "torch", "python"):
        if found[key] != record.get(key):
            raise _changed(target, f"its interpreter now reports another `{key}` than at the build")
    return record


def check_device(record: dict[str, Any], device: str) -> None:
    """Refuse the wrong torch build for a profile (`cpu` or `cuda`). Raises EnvironmentBroken."""
    build = str(record["torch"])
    local = build.partition("+")[2]
    if device == "cpu" and local != "cpu":
        raise EnvironmentBroken(
            f"torch is {build}, a CPU profile runs on +cpu: set PIP_EXTRA_INDEX_URL to PyTorch's index of "
            "CPU wheels (its Get Started page names it), then python -m trainer.environment ensure --rebuild"
        )
    if device == "cuda" and not local.startswith("cu"):
        raise EnvironmentBroken(
            f"torch is {build}, a CUDA profile needs a +cu build: rebuild where pip finds one, with "
            "python -m trainer.environment ensure --rebuild"
        )


def pins(requirements: Path = REQUIREMENTS) -> dict[str, str]:
    """The lock file's `name==version` lines, names normalized. Raises EnvironmentBroken for any other line."""
    wanted = {}
    for line in requirements.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            name, equal, version = text.partition("==")
            if not equal:
                raise EnvironmentBroken(f"{requirements.name} holds {text!r}, which pins nothing exactly")
            wanted[normalized(name)] = version.strip()
    return wanted


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _make_root(root: Path) -> None:
    missing = [each for each in (root, *root.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
    check_parents(root / "x")


@contextlib.contextmanager
def _locked(target: Path, say: Say) -> Iterator[None]:
    descriptor = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentBroken(
                        f"another build has held {target}.lock for {LOCK_WAIT_S / 60:.0f} minutes; look for a hanging "
                        "`trainer.environment ensure`"
                    ) from None
                if not said:
                    say("another build is under way, waiting for it")
                    said = True
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)


def _build(target: Path, requirements: Path, say: Say) -> None:
    began = time.monotonic()
    os.mkdir(target, 0o700)
    python = str(interpreter(target))
    say(f"creating {target}")
    # Files that others could write would fail verification, whatever the caller's umask.
    before = os.umask(0o022)
    try:
        _run([sys.executable, "-m", "venv", str(target)], target, say)
        say(f"installing {len(pins(requirements))} pinned distributions (about 2 GB; minutes, mostly download)")
        _run(
            [python, "-m", "pip", "install", "--no-input", "--progress-bar", "off", "-r", str(requirements)],
            target,
            say,
        )
        say("checking that requirements agree")
        _run([python, "-m", "pip", "check"], target, say)
        # The interpreter's first start may still write a cache file; after this nothing does.
        found = _ask_interpreter(target)
    finally:
        os.umask(before)
    manifest = json.dumps(_walk(target), separators=(",", ":"), sort_keys=True).encode()
    freeze = "".join(f"{name}=={version}\n" for name, version in sorted(found["versions"].items()))
    record = {
        "schema": 1,
        "requirements_hash": requirements_hash(requirements),
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "freeze_sha256": hashlib.sha256(freeze.encode()).hexdigest(),
        "built_s": round(time.monotonic() - began, 1),
        **found,
    }
    write_private_file(target / MANIFEST, manifest)
    write_private_file(target / RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
    say(f"built in {record['built_s']} s: torch {found['torch']}, ray {found['versions'].get('ray')}")


def _run(command: list[str], target: Path, say: Say) -> None:
    """Run one step of the build, passing on what it says; raise EnvironmentBroken with its last lines."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as step:
        tail: list[str] = []
        assert step.stdout is not None
        for line in step.stdout:
            text = line.strip()
            if text:
                tail = [*tail[-19:], text]
            if text.startswith(("Collecting", "Downloading", "Installing", "Successfully", "ERROR")):
                say(text[:160])
    if step.returncode != 0:
        raise EnvironmentBroken(
            f"`{' '.join(command[1:4])}` for {target} ended with {step.returncode}; none of it is used. Run it again "
            "once mended. Its last lines:\n  " + "\n  ".join(tail)
        )


_QUESTION = """
import importlib.metadata, json, re, sys
versions = {}
for each in importlib.metadata.distributions():
    name = each.metadata["Name"]
    if name:
        versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), each.version)
root = importlib.metadata.distribution("torch").locate_file("torch/version.py") if "torch" in versions else None
found = re.search(r"__version__ = '([^']+)'", root.read_text()) if root else None
print(json.dumps({"versions": versions, "torch": found.group(1) if found else "", "python": sys.version.split()[0]}))
"""


def _ask_interpreter(target: Path) -> dict[str, Any]:
    """Versions as that interpreter sees them; torch's own build is read from its source, which names it in full."""
    try:
        # -B, because a cache file written while looking would be a change.
        answer = subprocess.run(
            [str(interpreter(target)), "-I", "-B", "-c", _QUESTION], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _changed(target, f"its interpreter does not run ({error})") from error
    if answer.returncode != 0:
        raise _changed(target, f"its interpreter does not run: {answer.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def _walk(target: Path) -> dict[str, list[int]]:
    """Every file below ``target``: relative path to [size, mtime in ns]. Raises EnvironmentBroken for one that others
    could change. Links count as what they are; our own two records do not count."""
    found: dict[str, list[int]] = {}
    own = {0, os.geteuid()}
    prefix = len(str(target)) + 1
    pending = [str(target)]
    while pending:
        directory = pending.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                link = stat.S_ISLNK(status.st_mode)
                if status.st_uid not in own or (status.st_mode & 0o022 and not link):
                    raise _changed(target, f"{entry.path[prefix:]} can be written by others")
                if stat.S_ISDIR(status.st_mode):
                    pending.append(entry.path)
                else:
                    found[entry.path[prefix:]] = [status.st_size, status.st_mtime_ns]
    for name in (RECORD, MANIFEST):
        found.pop(name, None)
    return found


def _compare(target: Path, wanted: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    for name, facts in wanted.items():
        have = found.get(name)
        if have is None:
            raise _changed(target, f"{name} is missing")
        if have != facts:
            raise _changed(target, f"{name} was changed (size {facts[0]} at the build, {have[0]} now)")
    for name in found.keys() - wanted.keys():
        # Python itself may add a cache file where the build had none; the sources it stands for are compared.
        if not ("__pycache__/" in name and name.endswith(".pyc")):
            raise _changed(target, f"{name} was added")


def _changed(target: Path, what: str) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"the application environment {target} is not what was built: {what}. Build it anew with "
        "`python -m trainer.environment ensure --rebuild`"
    )


def _remove(target: Path) -> None:
    if target.is_symlink() or not target.is_dir():
        raise NotPrivate(f"{target} is not a directory; look at it and remove it by hand")
    # Renamed first, so that a removal cut short cannot be taken for a build.
    doomed = target.with_name(f"{target.name}.removing-{os.getpid()}")
    os.rename(target, doomed)
    shutil.rmtree(doomed)


def main(arguments: list[str] | None = None) -> int:
    """The command line. `ensure` prints the environment's path as its last line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.environment", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("ensure", "verify", "path"))
    parser.add_argument("--root", type=Path, default=None, help="where environments lie")
    parser.add_argument("--rebuild", action="store_true", help="with ensure: throw the environment away first")
    options = parser.parse_args(arguments)
    try:
        if options.action == "path":
            print(path(options.root))
        elif options.action == "verify":
            record = verify(options.root)
            print(f"{path(options.root)}: unchanged since it was built (torch {record['torch']})")
        else:
            print(ensure(options.root, rebuild=options.rebuild, say=lambda line: print(line, flush=True)))
    except (EnvironmentBroken, NotPrivate) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
