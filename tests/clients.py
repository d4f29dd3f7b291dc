"""What tests of the clients share: the server that the conformance list asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.run import MAX_REQUESTS, PIPELINE
from tests.running import ServerProcess


@pytest.fixture(scope="session")
def conformance_address() -> Iterator[str]:
    """Where the pipelines of the list are served, as its README says."""
    arguments = ("--port", "0", "--max-requests", str(MAX_REQUESTS))
    with ServerProcess("echo", str(PIPELINE), arguments=arguments) as server:
        yield f"127.0.0.1:{server.await_serving()}"
