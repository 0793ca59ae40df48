"""The site is brought up once for all of these tests, and taken down whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.hosts.site import Site, forwarded, s3_for
from tests.integration.stack import Stack

NAMESPACE = "hosts"


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


@pytest.fixture(scope="session")
def stack(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded stack, and in a namespace of its own a worker that has SkyPilot. The nodes reach the stack's storage
    by this machine's address on their network, and so does that worker: both must name it alike."""
    root = tmp_path_factory.mktemp("stack")
    root.chmod(0o700)
    made = Stack(root)
    made.start()
    try:
        near = urlsplit(made.env["AWS_ENDPOINT_URL"]).port
        assert near
        with forwarded(site.address, site.first_port + 92, near) as url:
            made.namespace(NAMESPACE)
            with made.another_worker(NAMESPACE, AWS_ENDPOINT_URL=url, **site.settings()):
                yield made
    finally:
        status = made.stop()
    assert status == 0, made.output.read_text()
