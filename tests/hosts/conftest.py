"""The site is brought up once for all of these tests, and taken down whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.site import Site, s3_for


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("namespaces and Slurm's daemons need root")
    with Site().up() as found:
        yield found


@pytest.fixture(scope="session")
def s3(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    place: Path = tmp_path_factory.mktemp("s3")
    with s3_for(site, place) as found:
        yield found
