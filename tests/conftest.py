"""What tests of every room share: a real S3 server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from hypothesis import settings

# Shared machines stall now and then: an example is judged by its result, a hanging test by its time-out.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

S3_SERVER = Path(__file__).parent / "servers" / "s3_server.sh"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[dict[str, Any]]:
    """The storage_options of a real S3 server: the one that the environment names, or one started for this session."""
    given = os.environ.get("PENSTOCK_TEST_S3_ENDPOINT")
    if given:
        yield {
            "endpoint": given,
            "access_key": os.environ["AWS_ACCESS_KEY_ID"],
            "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }
        return
    if not shutil.which("radosgw"):
        reason = (
            f"no S3 server: run `{S3_SERVER.name} install` in tests/servers as root on Debian, or set "
            "PENSTOCK_TEST_S3_ENDPOINT, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
        if os.environ.get("CI", "").lower() not in {"", "0", "false"}:
            pytest.fail(reason + "; in CI the S3 tests may not be skipped")
        pytest.skip(reason)
    # A short path of its own: the daemons' sockets may not have long names, and several test runs may go on at once.
    folder = tempfile.mkdtemp(prefix="penstock-s3-")
    try:
        command = [S3_SERVER, "start", folder]
        started = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=120)
        if started.returncode:
            pytest.fail(f"{S3_SERVER} did not start a server; its messages are above")
        yield {"endpoint": started.stdout.strip(), "access_key": "test", "secret_key": "testsecret"}
    finally:
        subprocess.run([S3_SERVER, "stop", folder], timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3_url(s3_endpoint: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the URL of a new, empty bucket, its storage_options)."""
    name = f"penstock-{uuid4().hex[:12]}"
    make_bucket(name, s3_endpoint)
    return f"s3://{name}", dict(s3_endpoint)


def make_bucket(name: str, options: dict[str, Any]) -> None:
    """Create a bucket: a PUT of its URL, signed by obstore, which has no verb for it."""
    import urllib.request
    from datetime import timedelta

    import obstore
    from obstore.store import S3Store

    client = S3Store(
        name,
        endpoint=options["endpoint"],
        access_key_id=options["access_key"],
        secret_access_key=options["secret_key"],
        region="us-east-1",
        client_options={"allow_http": urlsplit(options["endpoint"]).scheme == "http"},
    )
    url = obstore.sign(client, "PUT", "", timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=20).close()
