"""The real S3 server that benches read from: the one that the environment names, or Ceph's gateway."""

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
from urllib.parse import urlsplit

from ...loader.errors import ConfigError

_SCRIPT = Path(__file__).parents[2] / "tests" / "servers" / "s3_server.sh"
_WHAT_TO_DO = (
    "set PENSTOCK_TEST_S3_ENDPOINT, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a server of your own, or, on "
    "Debian and as root, run `tests/servers/s3_server.sh install` in a clone of the repository"
)


@contextmanager
def serve_s3(*, plain_http: bool = False) -> Iterator[dict[str, str]]:
    """The storage options of a server, which is stopped at the end if it was started here.

    With ``plain_http`` the one that the environment names must speak that, as a proxy which spoils answers does.

    Raises:
        ConfigError: there is no server and none can be started; says what to do.
    """
    given = os.environ.get("PENSTOCK_TEST_S3_ENDPOINT")
    if given:
        if plain_http and urlsplit(given).scheme != "http":
            raise ConfigError(f"PENSTOCK_TEST_S3_ENDPOINT={given}: the proxy can spoil plain http:// only")
        try:
            keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        except KeyError as exc:
            raise ConfigError(f"PENSTOCK_TEST_S3_ENDPOINT is set, and {exc} is not") from exc
        yield {"endpoint": given, "access_key": keys[0], "secret_key": keys[1]}
        return
    if not shutil.which("radosgw") or not _SCRIPT.exists():
        raise ConfigError(f"there is no S3 server here: {_WHAT_TO_DO}")
    folder = tempfile.mkdtemp(prefix="penstock-s3-")  # a short path: the daemons' sockets may not have long names
    try:
        started = subprocess.run([_SCRIPT, "start", folder], check=False, capture_output=True, text=True, timeout=180)
        if started.returncode:
            raise ConfigError(f"the S3 server did not start: {started.stderr.strip()[-300:]}; {_WHAT_TO_DO}")
        yield {"endpoint": started.stdout.strip(), "access_key": "test", "secret_key": "testsecret"}
    finally:
        subprocess.run([_SCRIPT, "stop", folder], check=False, timeout=60, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def make_bucket(name: str, options: Mapping[str, str]) -> None:
    """Create a bucket: a PUT of its URL, signed by obstore, which has no call for it."""
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
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30).close()
