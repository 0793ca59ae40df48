from __future__ import annotations

import socket
from pathlib import Path

from worker import ports

NAMES = ("a", "b", "c")


def test_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    chosen = ports.choose(Path("/some/home"), NAMES, {})
    assert len(set(chosen.values())) == 3
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(19_999 < port < max(lowest, 32_768) for port in chosen.values())
    assert all(ports.is_free(port) for port in chosen.values())


def test_two_homes_do_not_reach_for_the_same_ports() -> None:
    one = ports.choose(Path("/home/a/lanyard/.lanyard"), NAMES, {})
    two = ports.choose(Path("/home/b/lanyard/.lanyard"), NAMES, {})
    assert not set(one.values()) & set(two.values())


def test_a_port_is_kept_unless_something_else_took_it() -> None:
    home = Path("/some/home")
    before = ports.choose(home, NAMES, {})
    assert ports.choose(home, NAMES, before) == before
    with socket.socket() as taken:
        taken.bind((ports.LOOPBACK, before["b"]))
        taken.listen()
        now = ports.choose(home, NAMES, before)
    assert now["a"] == before["a"]
    assert now["c"] == before["c"]
    assert now["b"] not in before.values()
