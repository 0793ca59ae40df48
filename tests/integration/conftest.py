"""One stack for the whole session, the census that watches it, and the one full run that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.census import Census
from tests.integration.full_run import Carried, carry
from tests.integration.stack import BUCKET, Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Up for the session. At its end it must stop by itself with exit status 0."""
    root = tmp_path_factory.mktemp("integration")
    root.chmod(0o700)
    made = Stack(root)
    made.start()
    yield made
    assert made.stop() == 0, made.output.read_text()


@pytest.fixture(scope="session")
def census(stack: Stack) -> Iterator[Census]:
    """Watches all processes of the session's runs. What is left at the end is ended, so that a failed test leaves
    nothing on the machine."""
    made = Census(
        mark=stack.mark,
        home=stack.home,
        scratch=stack.scratch,
        services=stack.services,
        client=lambda: stack.env,
        namespaces=lambda: stack.namespaces,
        s3=stack.s3,
        bucket=BUCKET,
    )
    yield made
    left = stack.end_runs()
    ended = made.end_leftovers()
    made.close()
    assert (left, ended) == ([], []), "a test that failed left this; it was terminated, released, ended"


@pytest.fixture(scope="session")
def full(stack: Stack, census: Census) -> Carried:
    """One full run with a drill, from its start until custody has closed."""
    return carry(stack, census)
