"""Private directories and files that fail closed. Standard library only.

A private directory is *fresh* (nothing was there), made by us with mode 0700, and stands below directories in which
nobody else can put, swap or remove an entry. Whatever is found instead is refused and left untouched, as evidence.

What counts as shared write access on a parent, and why:

* Write permission for others, or for a group, is shared: anyone who has it can rename our directory away and put
  their own in its place.
* A sticky directory owned by root or by us (``/tmp``) is accepted. There only the owner of an entry may rename or
  remove it, and we make ours with ``mkdir``, which fails if anything, a link included, already has the name.
* The user's own private group (same number and name as the user, nobody else in it, never root's) is not shared:
  distributions that give every user such a group also default to a umask of 0002.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotPrivate(Exception):
    """A path cannot be trusted to be private. The message names it and says what to do."""


def create_private_directory(path: Path) -> None:
    """Create ``path`` fresh, mode 0700, below parents without shared write access.

    Raises NotPrivate when anything already stands there (a directory, a file, a link, even a dangling one), when a
    parent is missing, or when one can be written by somebody else. Nothing that was found is changed.
    """
    check_parents(path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError as error:
        raise NotPrivate(
            f"{path} already exists ({_describe(path)}). It is left as it is, as evidence of an earlier attempt; "
            "a new run gets a new directory. Look at it, then remove it by hand."
        ) from error
    except FileNotFoundError as error:
        raise NotPrivate(f"the parent of {path} does not exist; create it with mode 0700") from error
    os.chmod(path, 0o700)  # mkdir's mode is subject to the umask, which may take away our own bits
    check_private_directory(path)


def check_private_directory(path: Path, *, opened: bool = False) -> None:
    """Raise NotPrivate unless ``path`` is a real directory, ours, of mode 0700 exactly, with trustworthy parents.

    With ``opened``, 0755 will do: others may read what is in it.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError as error:
        raise NotPrivate(f"{path} does not exist") from error
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate(f"{path} is {_describe(path)}, not a directory; remove it by hand after looking at it")
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"{path} belongs to uid {found.st_uid}, not to uid {os.geteuid()} which runs this")
    if stat.S_IMODE(found.st_mode) not in ((0o700, 0o755) if opened else (0o700,)):
        raise NotPrivate(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, must be 0700: chmod 0700 {path}")
    check_parents(path)


def check_parents(path: Path) -> None:
    """Raise NotPrivate when a directory above ``path`` can be changed by anyone but root and us.

    Checked along the path as written and along the path it really leads to, so that a link above cannot hide a
    shared directory; a link itself must belong to root or to us.
    """
    written = Path(os.path.abspath(path))
    for parent in _unique([*written.parents, *Path(os.path.realpath(written.parent) + "/x").parents]):
        try:
            entry = os.lstat(parent)
            found = os.stat(parent)
        except OSError as error:
            raise NotPrivate(f"cannot check {parent}, above {path}: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise NotPrivate(f"{parent}, above {path}, is not a directory")
        for owner in (entry.st_uid, found.st_uid):
            if owner not in (0, os.geteuid()):
                raise NotPrivate(f"{parent}, above {path}, belongs to uid {owner}; use a place that is yours or root's")
        if _shared(found):
            raise NotPrivate(
                f"{parent}, above {path}, has mode {stat.S_IMODE(found.st_mode):04o}: others can write in it. "
                f"Remove that (chmod go-w {parent}) or choose another place"
            )


def write_private_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write ``data`` to ``path`` with mode 0600, whole or not at all.

    With ``exclusive``, raise FileExistsError when the file is there already (first writer wins); the content is
    complete the moment the name appears.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_private_file(path: Path, what: str) -> bytes:
    """Read a file that holds a secret or an order: a regular file, ours, closed to group and others.

    Raises NotPrivate, naming ``what`` it is, otherwise.
    """
    try:
        # Not blocking: what is named may be a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotPrivate(f"{what} {path} does not exist") from error
    except OSError as error:
        raise NotPrivate(f"cannot open {what} {path}: {error.strerror} (a link is refused)") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate(f"{what} {path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise NotPrivate(f"{what} {path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}")
        if found.st_mode & 0o077:
            raise NotPrivate(
                f"{what} {path} has mode {stat.S_IMODE(found.st_mode):04o}: others may read it. chmod 0600 {path}"
            )
        return file.read()


def _shared(found: os.stat_result) -> bool:
    if not found.st_mode & 0o022:
        return False
    if found.st_mode & stat.S_ISVTX and found.st_uid in (0, os.geteuid()):
        return False
    return bool(found.st_mode & 0o002) or not _own_private_group(found.st_gid)


def _own_private_group(gid: int) -> bool:
    import grp
    import pwd

    uid = os.geteuid()
    if uid == 0 or gid != uid:
        return False
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _describe(path: Path) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "unreadable"
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _unique(paths: list[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))
