"""TLS before a server: who trusts its certificate reads what the server has, and nobody else does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from missing_server import skip_or_fail_in_ci

from penstock.benchmarks.stores.tls_line import tls_line, trust
from penstock.loader.errors import ConfigError
from penstock.storage import StoreUnavailableError, open_store
from penstock.storage.retrying.retry import RetryConfig


@pytest.fixture
def tls_options(s3_endpoint: dict[str, str]) -> Iterator[dict[str, str]]:
    if not shutil.which("nginx"):
        skip_or_fail_in_ci("no nginx: apt-get install nginx-light")
    with tls_line(s3_endpoint["endpoint"]) as options:
        yield s3_endpoint | options


def test_objects_are_written_and_read_over_tls_by_who_trusts_its_certificate(
    tls_options: dict[str, str], s3_url: tuple[str, dict[str, str]]
) -> None:
    url, plain = s3_url
    key = "a folder/x+y%20z"
    open_store(url, storage_options=tls_options).put(key, b"1234567")
    assert bytes(open_store(url, storage_options=tls_options).get(key, range(2, 5))) == b"345"
    assert bytes(open_store(url, storage_options=plain).get(key)) == b"1234567"
    untrusting = {name: value for name, value in tls_options.items() if name != "root_certificate"}
    with pytest.raises(StoreUnavailableError):
        open_store(url, storage_options=untrusting, retry=RetryConfig(deadline_s=0.5)).get(key)


def test_other_libraries_are_told_what_to_trust(tls_options: dict[str, str], tmp_path: Path) -> None:
    environment = trust(tls_options, str(tmp_path))
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "try: urllib.request.urlopen(sys.argv[1])\n"
        "except urllib.error.HTTPError as error: print('answered', error.code)\n"
        "except urllib.error.URLError: print('refused')\n"
    )
    command = [sys.executable, "-c", ask, f"{tls_options['endpoint']}/no-such-bucket/x"]
    said = [subprocess.check_output(command, env=env, text=True) for env in (environment, {})]
    assert said[0].startswith("answered 40")
    assert said[1] == "refused\n"
    assert trust({"endpoint": "http://127.0.0.1"}, str(tmp_path)) == {}


def test_what_cannot_have_tls_before_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"plain http:// only"), tls_line("https://127.0.0.1:9"):
        pass
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="nginx is not installed"), tls_line("http://127.0.0.1:9"):
        pass
