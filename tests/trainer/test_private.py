"""A private directory is fresh, ours and 0700 below trustworthy parents; anything else is refused and left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer import private
from trainer.private import NotPrivate, check_private_directory, create_private_directory, read_private_file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_fresh_directory_has_mode_0700_whatever_the_umask(place: Path) -> None:
    before = os.umask(0o277)
    try:
        create_private_directory(place / "fresh")
    finally:
        os.umask(before)
    assert (place / "fresh").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o772, 0o777])
def test_a_parent_that_others_can_write_is_refused_and_nothing_is_made(place: Path, mode: int) -> None:
    parent = place / "shared"
    parent.mkdir()
    parent.chmod(mode)
    with pytest.raises(NotPrivate, match=r"chmod go-w .*/shared"):
        create_private_directory(parent / "fresh")
    assert list(parent.iterdir()) == []


def test_a_shared_grandparent_is_refused_too(place: Path) -> None:
    (place / "shared" / "mine").mkdir(parents=True, mode=0o700)
    (place / "shared").chmod(0o777)
    with pytest.raises(NotPrivate, match="shared"):
        create_private_directory(place / "shared" / "mine" / "fresh")


def test_a_sticky_parent_of_ours_is_accepted(place: Path) -> None:
    parent = place / "sticky"
    parent.mkdir()
    parent.chmod(0o1777)
    create_private_directory(parent / "fresh")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_s_parent_is_refused_sticky_or_not(place: Path) -> None:
    for name, mode in (("theirs", 0o755), ("sticky", 0o1777)):
        parent = place / name
        parent.mkdir()
        parent.chmod(mode)
        os.chown(parent, 12345, 12345)
        with pytest.raises(NotPrivate, match="belongs to uid 12345"):
            create_private_directory(parent / "fresh")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_s_directory_is_not_private(place: Path) -> None:
    create_private_directory(place / "theirs")
    os.chown(place / "theirs", 12345, 12345)
    with pytest.raises(NotPrivate, match="belongs to uid 12345"):
        check_private_directory(place / "theirs")


def test_a_link_above_does_not_hide_a_shared_directory(place: Path) -> None:
    (place / "shared").mkdir()
    (place / "shared").chmod(0o777)
    (place / "innocent").symlink_to(place / "shared")
    with pytest.raises(NotPrivate, match="others can write"):
        create_private_directory(place / "innocent" / "fresh")


def test_a_missing_parent_is_said(place: Path) -> None:
    with pytest.raises(NotPrivate, match="nowhere"):
        create_private_directory(place / "nowhere" / "fresh")


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o755, 0o500])
def test_another_mode_than_0700_is_not_private(place: Path, mode: int) -> None:
    create_private_directory(place / "open")
    (place / "open").chmod(mode)
    with pytest.raises(NotPrivate, match="must be 0700"):
        check_private_directory(place / "open")


def test_a_user_s_own_private_group_is_not_shared_but_root_s_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    user = pwd.struct_passwd(("ann", "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for members, private_group in (([], True), (["ann"], True), (["ann", "bob"], False)):
        group = grp.struct_group(("ann", "x", 1000, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert private._own_private_group(1000) is private_group
    assert not private._own_private_group(100)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not private._own_private_group(0)


def test_a_secret_is_read_only_from_a_closed_file_of_ours(place: Path) -> None:
    secret = place / "secret"
    private.write_private_file(secret, b"s")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_private_file(secret, "the secret") == b"s"
    secret.chmod(0o640)
    with pytest.raises(NotPrivate, match="chmod 0600"):
        read_private_file(secret, "the secret")
    (place / "link").symlink_to(secret)
    with pytest.raises(NotPrivate, match="link"):
        read_private_file(place / "link", "the secret")
    with pytest.raises(NotPrivate, match=r"the secret .* does not exist"):
        read_private_file(place / "none", "the secret")


def test_the_first_of_two_exclusive_writers_wins(place: Path) -> None:
    private.write_private_file(place / "once", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        private.write_private_file(place / "once", b"second", exclusive=True)
    assert (place / "once").read_bytes() == b"first"
    assert [each.name for each in place.iterdir()] == ["once"]
