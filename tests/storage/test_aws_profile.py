"""Profiles of ~/.aws: commands that print credentials, roles, IAM Identity Center; and credentials that end."""

from __future__ import annotations

import datetime
import hashlib
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.storage import NoCredentialsError, aws_profile, open_store
from penstock.storage.options import configure

EMPTY = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
STS = """<{0}Response><{0}Result><Credentials><AccessKeyId>{1}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>
<SessionToken>session</SessionToken><Expiration>{2}</Expiration></Credentials>
<AssumedRoleUser><AssumedRoleId>r</AssumedRoleId><Arn>arn:aws:sts::1:assumed-role/r/s</Arn></AssumedRoleUser>
</{0}Result></{0}Response>"""


class Amazon(http.server.ThreadingHTTPServer):
    """An empty bucket, a token service and a sign-in portal. ``keys`` signed requests to the bucket, in turn."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.keys = list[str]()
        self.asked = list[str]()
        self.holds = datetime.timedelta(hours=1)

    def list(self, **options: Any) -> None:
        with closing(open_store("s3://b", storage_options={"endpoint": self.url} | options)) as store:
            assert list(store.list()) == []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Amazon

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/federation/credentials":
            assert self.headers["x-amz-sso_bearer_token"] == "portal-token"
            self.server.asked.append("sso")
            if self.server.holds < datetime.timedelta(0):
                return self._answer(b'{"message": "Session token not found or invalid"}', 401)
            ends = (datetime.datetime.now(datetime.UTC) + self.server.holds).timestamp() * 1000
            given = {"accessKeyId": "OFSSO", "secretAccessKey": "s", "sessionToken": "t", "expiration": int(ends)}
            return self._answer(json.dumps({"roleCredentials": given}).encode())
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        self.server.keys.append(found[1] if found else "")
        return self._answer(EMPTY)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        query = parse_qs(body) | parse_qs(urlsplit(self.path).query)
        action = query["Action"][0]
        self.server.asked.append(action)
        ends = (datetime.datetime.now(datetime.UTC) + self.server.holds).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._answer(STS.format(action, f"OF{action.upper()}", ends).encode())

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("x-amzn-ErrorType", "UnauthorizedException")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def amazon() -> Iterator[Amazon]:
    with Amazon() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with an empty ~/.aws, and no other credentials."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setattr(aws_profile, "_valid", {})
    monkeypatch.setattr(aws_profile, "_sessions", {})
    (tmp_path / ".aws").mkdir()
    return tmp_path


def write_config(home: Path, text: str) -> None:
    (home / ".aws" / "config").write_text(text)


def write_process(home: Path, said: object, *, code: int = 0) -> str:
    """A command that prints ``said`` and counts its runs."""
    script = home / "print credentials.py"
    script.write_text(
        f"import pathlib, sys\nwith pathlib.Path({str(home / 'runs')!r}).open('a') as f: f.write('x')\n"
        f"print({said if isinstance(said, str) else json.dumps(said)!r})\nsys.exit({code})\n"
    )
    return f'"{sys.executable}" "{script}"'


def credentials(key: str = "OFPROCESS", secret: str = "secret", holds_s: float | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret}
    if holds_s is not None:
        ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=holds_s)
        given |= {"SessionToken": "token", "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return given


@pytest.mark.parametrize("profile", ["mine", "my own", "default"])
@pytest.mark.parametrize("holds_s", [None, 3600])
def test_a_credential_process_gives_the_credentials_of_its_profile(
    home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch, profile: str, holds_s: float | None
) -> None:
    monkeypatch.setenv("AWS_PROFILE", profile)
    section = {"my own": 'profile "my own"', "default": "default"}.get(profile, f"profile {profile}")
    write_config(home, f"[{section}]\ncredential_process = {write_process(home, credentials(holds_s=holds_s))}\n")
    for _ in range(3):
        amazon.list()
    amazon.list(timeout_s=20)
    assert amazon.keys == ["OFPROCESS"] * 4
    assert (home / "runs").read_text() == "x"  # for all stores of the process


def test_a_credential_process_is_run_again_before_its_credentials_end(home: Path, amazon: Amazon) -> None:
    said = f"credential_process = {write_process(home, credentials('OLD', holds_s=200))}\n"
    write_config(home, f"[profile mine]\n{said}")
    amazon.list()
    write_process(home, credentials("NEW", holds_s=3600))
    amazon.list(timeout_s=20)
    amazon.list(timeout_s=30)
    assert amazon.keys == ["OLD", "NEW", "NEW"]
    assert (home / "runs").read_text() == "xx"


@pytest.mark.parametrize(
    ("said", "code", "problem"),
    [
        (credentials(), 3, r"credential_process of the AWS profile 'mine' failed \(exit code 3\); run it by hand"),
        ({"Version": 2}, 0, "printed no JSON of version 1"),
        ({"Version": 1}, 0, "printed no JSON of version 1"),
        ("secret-secret", 0, "printed no JSON of version 1"),
        ([], 0, "printed no JSON of version 1"),
        (credentials() | {"Expiration": "tomorrow"}, 0, "printed no JSON of version 1"),
    ],
)
def test_a_credential_process_that_fails_is_named_without_what_it_printed(
    home: Path, amazon: Amazon, said: object, code: int, problem: str
) -> None:
    write_config(home, f"[profile mine]\ncredential_process = {write_process(home, said, code=code)}\n")
    with pytest.raises(NoCredentialsError, match=problem) as caught:
        amazon.list()
    assert "secret" not in str(caught.value)
    assert amazon.keys == []


def test_a_command_that_is_not_there_is_told(home: Path, amazon: Amazon) -> None:
    write_config(home, "[profile mine]\ncredential_process = /no/such/command\n")
    with pytest.raises(NoCredentialsError, match=r"could not be run \(FileNotFoundError\)"):
        amazon.list()


def test_other_credentials_come_before_a_credential_process(
    home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(home, f"[profile mine]\ncredential_process = {write_process(home, credentials())}\n")
    amazon.list(access_key="GIVEN", secret_key="secret")
    amazon.list(anonymous=True)
    (home / ".aws" / "credentials").write_text("[mine]\naws_access_key_id = FILE\naws_secret_access_key = secret\n")
    amazon.list()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    amazon.list()
    assert amazon.keys == ["GIVEN", "", "FILE", "ENVIRONMENT"]
    assert not (home / "runs").exists()


def test_a_provider_of_the_users_own_is_asked(home: Path, amazon: Amazon) -> None:
    def provide() -> dict[str, Any]:
        return {"access_key_id": "OWN", "secret_access_key": "secret", "token": None, "expires_at": None}

    amazon.list(credential_provider=provide)
    assert amazon.keys == ["OWN"]


def test_the_endpoint_of_a_profile_is_used(home: Path, amazon: Amazon) -> None:
    write_config(
        home, f"[profile mine]\nendpoint_url = {amazon.url}\naws_access_key_id = K\naws_secret_access_key = secret\n"
    )
    amazon.list(endpoint=None)
    assert amazon.keys == ["K"]


def test_the_web_identity_of_a_profile_is_obstores_to_exchange_and_to_renew(home: Path) -> None:
    """As that of the environment is, which pods of Kubernetes have (IRSA)."""
    said = {"web_identity_token_file": "/token", "role_arn": "arn:aws:iam::1:role/r", "role_session_name": "me"}
    write_config(home, "[profile mine]\n" + "\n".join(f"{name} = {value}" for name, value in said.items()))
    assert configure("s3", {})[0] == said | {"region": "us-east-1"}


def write_sign_in(home: Path) -> None:
    write_config(
        home,
        "[profile mine]\nsso_session = us\nsso_account_id = 123456789012\nsso_role_name = Reader\n"
        "[sso-session us]\nsso_start_url = https://us.awsapps.com/start\nsso_region = us-east-1\n",
    )
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=8)
    cache = home / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.sha1(b'us').hexdigest()}.json").write_text(
        json.dumps({"accessToken": "portal-token", "expiresAt": ends.strftime("%Y-%m-%dT%H:%M:%SZ"), "region": "x"})
    )


def find_sign_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it where botocore looks, which asks for the home folder once, when it is imported."""
    write_sign_in(home)
    monkeypatch.setattr("botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", str(home / ".aws/sso/cache"))


@pytest.mark.slow
def test_a_profile_that_signed_in_to_the_identity_center_gives_credentials(
    home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore")
    find_sign_in(home, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", amazon.url)
    amazon.list()
    amazon.list(timeout_s=20)
    assert (amazon.asked, amazon.keys) == (["sso"], ["OFSSO", "OFSSO"])


@pytest.mark.slow
def test_a_sign_in_that_has_ended_says_how_to_sign_in(
    home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("botocore")
    find_sign_in(home, monkeypatch)
    amazon.holds = -datetime.timedelta(hours=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", amazon.url)
    with pytest.raises(NoCredentialsError, match="`aws sso login --profile mine`"):
        amazon.list()


@pytest.mark.slow
def test_a_role_of_another_profile_is_taken_on(home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("botocore")
    write_config(
        home,
        "[profile mine]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\nregion = us-east-1\n"
        "[profile base]\naws_access_key_id = BASE\naws_secret_access_key = secret\n",
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", amazon.url)
    amazon.list()
    assert (amazon.asked, amazon.keys) == (["AssumeRole"], ["OFASSUMEROLE"])


def test_without_botocore_a_sign_in_says_what_to_install_or_run(
    home: Path, amazon: Amazon, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sign_in(home)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(NoCredentialsError, match="pip install boto3") as caught:
        amazon.list()
    assert 'eval "$(aws configure export-credentials --profile mine --format env)"' in str(caught.value)


@pytest.mark.s3
def test_a_real_server_takes_the_credentials_of_a_process(
    home: Path, s3_url: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = s3_url
    process = write_process(home, credentials(options["access_key"], options["secret_key"]))
    write_config(
        home,
        f"[profile mine]\ncredential_process = {process}\nendpoint_url = {options['endpoint']}\nregion = us-east-1",
    )
    with closing(open_store(url)) as store:
        assert "ranges='direct'" in repr(store)
        store.put("a", b"12345")
        assert bytes(store.get("a")) == b"12345"
        assert [info.key for info in store.list()] == ["a"]
