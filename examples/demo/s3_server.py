"""A real S3 server while the demo runs: Ceph's RADOS gateway, started by the script that the tests use."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

SCRIPT = Path(__file__).parents[2] / "tests" / "servers" / "s3_server.sh"
BUCKET = "penstock-demo"
ACCESS_KEY, SECRET_KEY, REGION = "test", "testsecret", "us-east-1"


class ServerError(Exception):
    """No S3 server can be started here; the message says why and what to do."""


@contextmanager
def run_s3_server() -> Iterator[tuple[str, Mapping[str, str]]]:
    """The URL of a new bucket on a new server, and the environment with which S3 clients reach it."""
    install_server()
    # A short path: the daemons' sockets may not have long names.
    folder = tempfile.mkdtemp(prefix="penstock-demo-")
    try:
        started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, timeout=180, check=False)
        if started.returncode:
            raise ServerError(f"the S3 server did not start: {started.stderr.strip()[-400:]}")
        endpoint = started.stdout.split()[-1]
        make_bucket(endpoint)
        yield (
            f"s3://{BUCKET}",
            {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_REGION": REGION,
            },
        )
    finally:
        subprocess.run([SCRIPT, "stop", folder], capture_output=True, timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def install_server() -> None:
    if shutil.which("radosgw"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise ServerError(
            "STORE=s3 needs Ceph's gateway, which can be installed here only by Debian's apt-get and root. "
            "Install the package radosgw, or name a bucket of yours: make demo STORE=s3://bucket/prefix"
        )
    installed = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, check=False)
    if installed.returncode:
        raise ServerError(f"Ceph's gateway could not be installed: {installed.stderr.strip()[-400:]}")


def make_bucket(endpoint: str) -> None:
    """A PUT of the bucket's URL, signed by obstore, which has no call for it."""
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region=REGION,
        client_options={"allow_http": True},
    )
    url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30).close()
