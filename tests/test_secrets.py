"""Runs that fail write no secret, on any store: not to stdout, stderr, logs, audit, metrics, cache or checkpoints."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from penstock import pack

pytestmark = pytest.mark.slow

ACCESS, SECRET, TOKEN = "AKIASECRETIDENTITY42", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYzEXAMPLE1", "FwoGZXIvYXdzEBYaDtoken=="
HEADER, PASSWORD = "Bearer hEaDeR-sEcReT-0123456789", "pAssw0rd-of-the-tests"
SAS = "sv=2024-11-04&ss=b&sig=U2lnbmF0dXJlT2ZUaGVUZXN0cw%3D%3D"
ACCOUNT_KEY = base64.b64encode(b"account-key-of-the-tests-0123456").decode()
PRIVATE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQDsecret"
KEY = bytes(range(100, 132))
SECRETS = [SECRET, TOKEN, HEADER, PASSWORD, SAS, "U2lnbmF0dXJlT2ZUaGVUZXN0cw", ACCOUNT_KEY, PRIVATE]
ENCRYPTION = [KEY.hex(), base64.b64encode(KEY).decode().rstrip("="), repr(KEY)[2:-1]]


class Echo(http.server.BaseHTTPRequestHandler):
    """Refuses everything, and says in many words what it was asked and with what headers."""

    protocol_version = "HTTP/1.1"
    status = 403

    def log_message(self, *_: object) -> None:
        pass

    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = " ".join(f"{name}: {value}" for name, value in self.headers.items())
        body = f"<Error><Code>Echo</Code>{headers}<StringToSign>{self.path}\n{self.headers}</StringToSign>".encode()
        self.send_response(self.status, "Echo")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = refuse  # noqa: N815 - as http.server calls them


@pytest.fixture
def echo(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (Echo,), {"status": getattr(request, "param", 403)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign] - a client that gives up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def probe(
    folder: Path, *stores: tuple[str, dict[str, Any]], environment: dict[str, str] | None = None, **more: Any
) -> str:
    """Everything that the probe writes: what it prints, and all files that it leaves."""
    source, work = folder / "source", folder / "work"
    pack([{"txt": "a"}, {"txt": "b"}], source, overwrite=True, progress=False)
    work.mkdir(exist_ok=True)
    given = [{"url": url, "options": options, "source": str(source), **more} for url, options in stores]
    own = {"XDG_RUNTIME_DIR": str(work), "PENSTOCK_CACHE": str(work / "manifests"), "HOME": str(work), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("secret_probe.py")],
        cwd=work,
        input=json.dumps(given),
        env={**os.environ, **own, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [path for path in work.rglob("*") if path.is_file()]
    written = "\n".join(path.read_bytes().decode("latin-1") + "\n" + str(path) for path in files)
    return done.stdout + done.stderr + written


def leaks(written: str, secrets: list[str]) -> list[str]:
    forms = {form for secret in secrets for form in (secret, quote(secret, safe=""), quote(secret), secret.strip("="))}
    return [
        f"{form}: ...{written[max(0, at - 200) : at + 50]}" for form in sorted(forms) if (at := written.find(form)) >= 0
    ]


S3 = {"access_key": ACCESS, "secret_key": SECRET, "token": TOKEN}
GOOGLE = json.dumps({"private_key": f"-----BEGIN PRIVATE KEY-----\n{PRIVATE}\n", "private_key_id": "1",
                     "client_email": "a@b", "gcs_base_url": "http://ECHO", "disable_oauth": True})  # fmt: skip


STORES: list[tuple[str, dict[str, Any]]] = [
    ("s3://bucket/data", {**S3, "endpoint": "http://ECHO", "default_headers": {"x-api-key": HEADER}}),
    ("s3://bucket/data", {**S3, "endpoint": f"http://me:{PASSWORD}@ECHO"}),
    ("s3://bucket/data", {**S3, "endpoint": "http://127.0.0.1:9", "proxy_url": f"http://me:{PASSWORD}@ECHO"}),
    ("s3://bucket/data", {**S3, "unknown_option": SECRET}),
    ("az://bucket/data", {"account_name": "me", "account_key": ACCOUNT_KEY, "endpoint": "http://ECHO"}),
    ("az://bucket/data", {"account_name": "me", "sas_key": SAS, "endpoint": "http://ECHO"}),
    ("gs://bucket/data", {"service_account_key": GOOGLE}),
    ("gs://bucket/data", {"service_account_key": GOOGLE.replace("private_key_id", "no")}),
    ("http://ECHO/data", {"default_headers": {"authorization": HEADER, "x-password": PASSWORD}}),
    (f"http://me:{PASSWORD}@ECHO/data", {}),
    (f"https://ECHO/data/a.tar?{SAS}", {}),
    (f"ftp://me:{PASSWORD}@127.0.0.1:9/data", {}),
    ("ftp://127.0.0.1:9/data", {"username": "me", "password": PASSWORD}),
]


@pytest.mark.parametrize("echo", [400], indirect=True)
def test_no_store_shows_what_it_was_given_to_a_server_that_echoes_it(tmp_path: Path, echo: str) -> None:
    filled = json.loads(json.dumps(STORES).replace("ECHO", echo))
    written = probe(tmp_path, *filled)
    assert leaks(written, [*SECRETS, ACCESS]) == []
    assert [scheme for scheme in ("s3", "az", "gs", "http", "ftp") if f"{scheme}://" not in written] == []
    assert written.count(" raised ") > 10 * len(STORES)


@pytest.mark.parametrize("echo", [400], indirect=True)
def test_credentials_of_the_environment_and_of_files_show_nowhere(tmp_path: Path, echo: str) -> None:
    (tmp_path / "credentials").write_text(f"[p]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {SECRET}\n")
    by_name = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
    by_file = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "AWS_PROFILE": "p"}
    for environment in (by_name, by_file):
        endpoint = {"AWS_ENDPOINT_URL_S3": f"http://{echo}"}
        written = probe(tmp_path, ("s3://bucket/data", {}), environment={**environment, **endpoint})
        assert leaks(written, [*SECRETS, ACCESS]) == []
        assert "the server refuses the request" in written


@pytest.mark.s3
def test_a_training_run_whose_store_fails_leaves_no_secret_in_its_folder(
    tmp_path: Path, s3_url: tuple[str, dict[str, Any]]
) -> None:
    url, options = s3_url
    options["default_headers"] = {"x-api-key": HEADER}
    samples = [{"txt": f"text {i}"} for i in range(60)]
    key = {"encryption_key": KEY}
    pack(samples, url + "/data", shard_bytes=10_000, progress=False, storage_options={**options, **key})
    from penstock.storage import open_client

    client = open_client(url + "/data", options)
    shard = sorted(info.key for info in client.list() if "shard" in info.key)[-1]
    data = bytearray(client.get(shard))
    data[-20] ^= 1
    written = probe(tmp_path, (url + "/data", options), key=KEY.hex(), train=True)
    assert "raised" not in written
    assert "step-" in written
    client.put(shard, data)
    again = probe(tmp_path, (url + "/data", options), key=KEY.hex(), train=True)
    assert "DecryptionError" in again
    assert leaks(written + again, [*SECRETS, *ENCRYPTION, options["secret_key"]]) == []


@pytest.mark.parametrize("how", ["another key", "no key", "damaged"])
def test_no_error_of_encryption_shows_a_key(tmp_path: Path, how: str) -> None:
    target = tmp_path / "data"
    pack([{"txt": "a"}, {"txt": "b"}], target, progress=False, storage_options={"encryption_key": KEY})
    if how == "damaged":
        for path in target.iterdir():
            data = bytearray(path.read_bytes())
            data[-20] ^= 1
            path.write_bytes(data)
    environment = {"PENSTOCK_ENCRYPTION_KEY": {"another key": bytes(32).hex(), "no key": KEY.hex()[:-2]}.get(how, "")}
    options = {} if how == "damaged" else {"encryption_key": "env"}
    more = {"key": KEY.hex()} if how == "damaged" else {}
    written = probe(tmp_path, (str(target), options), environment=environment, **more)
    assert leaks(written, [*ENCRYPTION, KEY.hex()[:-2]]) == []
    assert {"another key": "with another key", "no key": "is no key", "damaged": "not what was encrypted"}[
        how
    ] in written
