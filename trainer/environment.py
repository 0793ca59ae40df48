"""The application's environment: built once per machine, addressed by what it is made of, verified at each start.

    python -m trainer.environment ensure|verify|path [--root DIR] [--rebuild] [--shared]

It lies under ``--root``, else ``$LANYARD_ENVIRONMENTS``, else ``${XDG_CACHE_HOME:-~/.cache}/lanyard/environments``, in
a directory named by the hash of ``requirements.txt``, of the interpreter (version, ABI, platform) and of what is
recorded of a build. Standard library only, because it runs before the environment exists.

A virtual environment's scripts hold absolute paths, so it is built at its final path, under a lock; a `complete`
record, written last, is what makes it one. A build that was killed has none and is done again.

Verification compares every file with a manifest taken at the build, and then asks that interpreter for the versions it
really has. Names, sizes and modification times are compared each time. The bytes of all files are hashed and compared
once in each boot of the machine, and again whenever any file's size, inode or times are not what they were then; the
change time is among them, which no ordinary program can set back. (Measured on two cores: 44,000 files of 2.2 GB take
4 s from the page cache, a start that need not hash them 0.8 s.) So it finds damage and changes by hand, not what a
failing disk loses within a boot after the comparison, nor a forger who has our own rights and could write manifest and
record as well.

Nothing may be added but cache files that the interpreter makes of a source that is there, each of which must be what
that source compiles to: Python would run them in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import marshal
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.machine import boot_id
from trainer.private import NotPrivate, check_parents, check_private_directory, write_private_file

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RECORD = "complete.json"
MANIFEST = "manifest.json"
LAYOUT = "2: size, time and digest of each file"
"""What a manifest holds. It is part of the address, so that a build that recorded less is never taken for one."""
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
    """SHA-256 (hex) of the lock file together with the interpreter it is installed for, and of our layout."""
    interpreter = [sys.implementation.name, sys.version.split()[0], str(sysconfig.get_config_var("SOABI"))]
    parts = [*interpreter, sysconfig.get_platform(), LAYOUT, hashlib.sha256(requirements.read_bytes()).hexdigest()]
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
    device: str = "",
    say: Say = lambda line: None,
) -> Path:
    """Verify the environment, building it first if it is not there (or ``rebuild``); return its directory.

    With a ``device`` (`cpu` or `cuda`) the wrong build of torch is refused, before it is downloaded where it can be.

    Two builders do not collide: the second waits for the first, at most half an hour. Raises EnvironmentBroken, or
    NotPrivate when others can write where it lies. A complete environment that fails verification is *not* rebuilt
    unasked: what changed it is for a person to know.
    """
    target = path(root, requirements)
    _make_root(target.parent)
    if rebuild or not (target / RECORD).exists():
        with _locked(target, say):
            complete = (target / RECORD).exists()
            # One that is complete now is the build that was waited for.
            if rebuild or not complete:
                if os.path.lexists(target):
                    say("removing " + ("the environment" if complete else "an unfinished build"))
                    _remove(target)
                _build(target, requirements, device, say)
    record = verify(root, requirements=requirements)
    if device:
        check_device(record, device)
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
    _check_owner(target)
    try:
        record: dict[str, Any] = json.loads((target / RECORD).read_bytes())
        manifest_bytes = (target / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise EnvironmentBroken(f"the build of {target} was never finished; finish it with {remedy}") from error
    except ValueError as error:
        raise _changed(target, f"its record cannot be read ({error})") from error
    if hashlib.sha256(manifest_bytes).hexdigest() != record.get("manifest_sha256"):
        raise _changed(target, f"{MANIFEST} is not the one of the build")
    _compare(target, manifest_bytes, _walk(target))
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


def _check_owner(target: Path) -> None:
    """Ours alone; or root's, for everybody to use and nobody else to change (`ensure --shared`). Raises NotPrivate."""
    found = os.lstat(target)
    shared = found.st_uid == 0 and stat.S_ISDIR(found.st_mode) and _is_shared(target)
    if not shared or os.geteuid() == 0:
        check_private_directory(target, opened=shared)
        return
    if found.st_mode & 0o022:
        raise NotPrivate(f"{target} is root's and can be written by others: chmod go-w {target}")
    check_parents(target)


def _is_shared(target: Path) -> bool:
    try:
        return bool(os.lstat(target / RECORD).st_mode & 0o004)
    except OSError:
        return False


def share(target: Path) -> None:
    """Let every user of this machine use, and none change, an environment that root built. Raises NotPrivate."""
    if os.geteuid() != 0:
        raise NotPrivate("only root can share an environment: what anybody else owns, others cannot trust")
    for name in (target / RECORD, target / MANIFEST, _seal_of(target)):
        name.chmod(0o644)
    target.chmod(0o755)


def check_device(record: dict[str, Any], device: str) -> None:
    """Refuse the wrong torch build for a profile (`cpu` or `cuda`). Raises EnvironmentBroken."""
    build = str(record["torch"])
    local = build.partition("+")[2]
    if device == "cpu" and local != "cpu":
        raise EnvironmentBroken(
            f"torch is {build}, a CPU profile runs on +cpu: set PIP_EXTRA_INDEX_URL to PyTorch's index of "
            "CPU wheels (its Get Started page names it), then .venv/bin/python -m trainer.environment ensure --rebuild"
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


def _build(target: Path, requirements: Path, device: str, say: Say) -> None:
    began = time.monotonic()
    os.mkdir(target, 0o700)
    python = str(interpreter(target))
    say(f"creating {target}")
    # Files that others could write would fail verification, whatever the caller's umask.
    before = os.umask(0o022)
    try:
        _run([sys.executable, "-m", "venv", str(target)], target, say)
        if device:
            _check_offer(python, pins(requirements), device)
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
    files = _walk(target)
    manifest_bytes = _manifest(target, files)
    freeze = "".join(f"{name}=={version}\n" for name, version in sorted(found["versions"].items()))
    record = {
        "schema": 1,
        "requirements_hash": requirements_hash(requirements),
        "manifest_sha256": hashlib.sha256(manifest_bytes).hexdigest(),
        "freeze_sha256": hashlib.sha256(freeze.encode()).hexdigest(),
        "built_s": round(time.monotonic() - began, 1),
        **found,
    }
    write_private_file(target / MANIFEST, manifest_bytes)
    write_private_file(_seal_of(target), _seal(manifest_bytes, files))
    write_private_file(target / RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
    say(f"built in {record['built_s']} s: torch {found['torch']}, ray {found['versions'].get('ray')}")


OFFER_LIMIT_S = 120.0
"""pip is asked for an answer of a few kilobytes, or of one wheel that lies on this machine."""


def _check_offer(python: str, wanted: dict[str, str], device: str) -> None:
    """Refuse the wrong build of torch by what pip would fetch: it is several GB. A build without a local version is the
    CUDA one. Where pip cannot say, installing says why."""
    if "torch" not in wanted:
        return
    asked = [python, "-m", "pip", "install", "--no-input", "--quiet", "--dry-run", "--no-deps", "--report", "-"]
    try:
        answer = subprocess.run(
            [*asked, f"torch=={wanted['torch']}"], capture_output=True, text=True, timeout=OFFER_LIMIT_S
        )
        version = json.loads(answer.stdout)["install"][0]["metadata"]["version"]
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return
    check_device({"torch": version if "+" in version else f"{version}+cu"}, device)


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


def _walk(target: Path) -> dict[str, os.stat_result]:
    """Every file below ``target`` by its relative path. Links count as what they are; our own two records do not count.

    Raises EnvironmentBroken for a file that others could change, or that is no plain file.
    """
    found: dict[str, os.stat_result] = {}
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
                elif link or stat.S_ISREG(status.st_mode):
                    found[entry.path[prefix:]] = status
                else:
                    raise _changed(target, f"{entry.path[prefix:]} is no plain file")
    for name in (RECORD, MANIFEST):
        found.pop(name, None)
    return found


def _manifest(target: Path, files: Mapping[str, os.stat_result]) -> bytes:
    """Relative path to [size, mtime in ns, digest] of each file."""
    digests = _digests(target, files)
    facts = {name: [status.st_size, status.st_mtime_ns, digests[name]] for name, status in files.items()}
    return json.dumps(facts, separators=(",", ":"), sort_keys=True).encode()


def _digests(target: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 (hex) of each file's bytes, of a link's target."""

    def digest(name: str) -> tuple[str, str]:
        file = target / name
        if file.is_symlink():
            return name, hashlib.sha256(os.readlink(file).encode()).hexdigest()
        with file.open("rb") as stream:
            return name, hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return dict(pool.map(digest, names))


def _compare(target: Path, manifest_bytes: bytes, found: Mapping[str, os.stat_result]) -> None:
    """Raise EnvironmentBroken where what was found is not what the manifest says."""
    wanted: dict[str, tuple[int, int, str]] = json.loads(manifest_bytes)
    for name, (size, time_ns, _) in wanted.items():
        status = found.get(name)
        if status is None:
            raise _changed(target, f"{name} is missing")
        if (status.st_size, status.st_mtime_ns) != (size, time_ns):
            raise _changed(target, f"{name} was changed (size {size} at the build, {status.st_size} now)")
    seal, place = _seal(manifest_bytes, found), _seal_of(target)
    if _read_seal(place) == seal:
        return
    for name in sorted(found.keys() - wanted.keys()):
        if not _is_cache_of_a_source(target, name, wanted):
            raise _changed(target, f"{name} was added")
    for name, digest in _digests(target, wanted).items():
        if digest != wanted[name][2]:
            raise _changed(target, f"{name} was changed (its size and date are those of the build, its bytes are not)")
    # Another user's environment is compared whole at each start until root has verified it in this boot.
    if os.geteuid() == os.lstat(target).st_uid:
        shared = place.is_file() and place.stat().st_mode & 0o044
        write_private_file(place, seal)
        if shared:
            place.chmod(0o644)


def _seal_of(target: Path) -> Path:
    # Beside the environment: what is written into it while another looks would be taken for a change.
    return target.with_name(f"{target.name}.verified")


def _read_seal(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except (FileNotFoundError, PermissionError):
        return b""


def _seal(manifest_bytes: bytes, files: Mapping[str, os.stat_result]) -> bytes:
    """A digest of this boot, the manifest, and everything by which the system tells that a file was touched."""
    digest = hashlib.sha256(f"{boot_id()}\n{hashlib.sha256(manifest_bytes).hexdigest()}\n".encode())
    for name in sorted(files):
        status = files[name]
        facts = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        digest.update(f"{name!r} {facts}\n".encode())
    return digest.hexdigest().encode()


def _is_cache_of_a_source(target: Path, name: str, wanted: Mapping[str, Any]) -> bool:
    """Whether an added file is what this interpreter makes, at any level of optimization, of a source of the build.

    The environment's interpreter is of the version of ours (the address says so), so ours compiles alike.
    """
    cache = target / name
    try:
        source = importlib.util.source_from_cache(name)
        levels = [
            level
            for level, tag in enumerate(("", "1", "2"))
            if importlib.util.cache_from_source(source, optimization=tag) == name
        ]
        if source not in wanted or not levels or cache.is_symlink():
            return False
        data = cache.read_bytes()
        made = compile((target / source).read_bytes(), source, "exec", dont_inherit=True, optimize=levels[0])
        # What is not to be trusted is compared, not run; marshal alone reads what Python would read at an import.
        loaded = marshal.loads(data[16:])  # noqa: S302
        return data[:4] == importlib.util.MAGIC_NUMBER and bool(loaded == made)
    except (ValueError, EOFError, TypeError, SyntaxError, OSError):
        return False


def _changed(target: Path, what: str) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"the application environment {target} is not what was built: {what}. Build it anew with "
        "`python -m trainer.environment ensure --rebuild`"
    )


def _remove(target: Path) -> None:
    if target.is_symlink() or not target.is_dir():
        raise NotPrivate(f"{target} is not a directory; look at it and remove it by hand")
    # Renamed first, so that a removal cut short cannot be taken for a build.
    _seal_of(target).unlink(missing_ok=True)
    doomed = target.with_name(f"{target.name}.removing-{os.getpid()}")
    os.rename(target, doomed)
    shutil.rmtree(doomed)


def main(arguments: list[str] | None = None) -> int:
    """The command line. `ensure` prints the environment's path as its last line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.environment", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("ensure", "verify", "path"))
    parser.add_argument("--root", type=Path, default=None, help="where environments lie")
    parser.add_argument("--rebuild", action="store_true", help="with ensure: throw the environment away first")
    parser.add_argument("--shared", action="store_true", help="with ensure, by root: for every user to use")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="", help="with ensure: refuse a build of torch for another"
    )
    options = parser.parse_args(arguments)
    try:
        if options.action == "path":
            print(path(options.root))
        elif options.action == "verify":
            record = verify(options.root)
            print(f"{path(options.root)}: unchanged since it was built (torch {record['torch']})")
        else:
            told = ensure(
                options.root,
                rebuild=options.rebuild,
                device=options.device,
                say=lambda line: print(line, flush=True),
            )
            if options.shared:
                share(told)
            print(told)
    except (EnvironmentBroken, NotPrivate) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
