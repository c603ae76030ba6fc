"""Wrong URLs, options, credentials and servers: a clear error of our own type, and no secret in it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from penstock import open_store
from penstock.storage import (
    AccessDeniedError,
    ByteRange,
    NotFoundError,
    ObjectInfo,
    RetryConfig,
    StorageError,
    Store,
    StoreUnavailableError,
    ThrottledError,
    UnsupportedURLError,
    open_client,
    split_url,
)
from penstock.storage.clients.remote import drop_folder_markers
from penstock.storage.clients.remote_errors import Translator
from penstock.storage.options import configure, find_secrets

SECRET = "sEcReT/kEy+0123456789abcdef"
WRONG = "WRONGWRONG0123456789"
ASKS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("train/x.tar", ByteRange(0, 9)),
    "head": lambda store: store.head("train/x.tar"),
    "list": lambda store: list(store.list("train/")),
    "put": lambda store: store.put("train/x.tar", b"x"),
}


@pytest.mark.s3
@pytest.mark.parametrize("verb", ASKS)
def test_a_missing_bucket_is_not_found(s3_endpoint: dict[str, Any], verb: str) -> None:
    store = open_store(f"s3://penstock-none-{uuid4().hex[:8]}/a", storage_options=s3_endpoint)
    with pytest.raises(NotFoundError, match=r"s3://penstock-none-.*bucket"):
        ASKS[verb](store)


@pytest.mark.s3
@pytest.mark.parametrize("verb", ASKS)
@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_wrong_credentials_are_refused_at_once_and_shown_nowhere(
    s3_url: tuple[str, dict[str, Any]], wrong: str, verb: str
) -> None:
    url, options = s3_url
    store = open_store(url, storage_options={**options, wrong: WRONG})
    with pytest.raises(AccessDeniedError, match="check") as caught:
        ASKS[verb](store)
    shown = "".join(traceback.format_exception(caught.value)) + repr(store)
    assert WRONG not in shown
    assert options["secret_key"] not in shown


@pytest.mark.s3
def test_a_prefix_of_a_bucket_is_a_root_of_its_own(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    store = open_store(url, storage_options=options)
    store.put("a/x", b"1")
    assert [info.key for info in open_store(url + "/a", storage_options=options).list()] == ["x"]
    assert list(open_store(url + "/none", storage_options=options).list()) == []


@pytest.mark.s3
def test_anonymous_access_to_private_data_is_refused(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    store = open_store(url, storage_options={"endpoint_url": options["endpoint"], "anonymous": True})
    with pytest.raises(AccessDeniedError):
        store.get("x")


@pytest.mark.s3
def test_endpoint_and_credentials_come_from_the_environment(
    s3_url: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = s3_url
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_key"])
    store = open_store(url)
    store.put("x", b"1")
    assert store.get("x") == b"1"


@pytest.mark.s3
def test_credentials_come_from_the_profile_that_the_environment_names(
    s3_url: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, options = s3_url
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {options['access_key']}\naws_secret_access_key = {options['secret_key']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert list(open_store(url, storage_options={"endpoint": options["endpoint"]}).list()) == []


def test_a_server_that_can_not_be_reached_is_unavailable_and_says_for_how_long_it_was_tried() -> None:
    store = open_store(
        "s3://bucket",
        storage_options={"endpoint": "http://127.0.0.1:9", "access_key": "a", "secret_key": SECRET},
        retry=RetryConfig(deadline_s=0.2, first_delay_s=0.01),
    )
    for ask in ASKS.values():
        with pytest.raises(StoreUnavailableError, match=r"s3://bucket.*tried \d+ times") as caught:
            ask(store)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("server", ["nginx_url", "python_url"])
@pytest.mark.parametrize(
    ("folder", "error"), [("busy", ThrottledError), ("broken", StoreUnavailableError), ("denied", AccessDeniedError)]
)
def test_the_status_of_a_web_server_becomes_the_right_error(
    request: pytest.FixtureRequest, server: str, folder: str, error: type[StorageError]
) -> None:
    store = open_client(f"{request.getfixturevalue(server)}/{folder}")
    with pytest.raises(error, match=f"{folder}/x"):
        store.get("x", ByteRange(0, 1))


@pytest.mark.parametrize("server", ["nginx_url", "python_url"])
def test_a_web_server_without_an_index_can_not_be_listed_but_is_read(
    request: pytest.FixtureRequest, server: str
) -> None:
    store = open_store(f"{request.getfixturevalue(server)}/blind")
    store.put("x", b"123")
    assert store.get("x") == b"123"
    with pytest.raises(UnsupportedURLError, match="name the shards with a brace pattern"):
        store.list()


def test_a_process_forked_after_a_request_gets_an_error_instead_of_a_hang(python_url: str) -> None:
    program = f"""
import os
from penstock.storage import StorageError, open_store
store = open_store("{python_url}/forked")
store.put("x", b"1")
child = os.fork()
if child == 0:
    try:
        store.get("x")
    except StorageError as exc:
        os._exit(7 if "spawn" in str(exc) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_markers_of_folders_are_no_objects_but_empty_objects_are() -> None:
    listed = [ObjectInfo("a", 0), ObjectInfo("a/b", 0), ObjectInfo("a/b/c", 0), ObjectInfo("ab", 0), ObjectInfo("x", 1)]
    assert [info.key for info in drop_folder_markers(listed)] == ["a/b/c", "ab", "x"]


def test_a_missing_folder_of_a_web_server_is_not_found(python_url: str) -> None:
    with pytest.raises(NotFoundError):
        open_store(f"{python_url}/none").list()


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none"):
        open_store(tmp_path / "none").list()


def test_a_file_that_may_not_be_read_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFoundError, match="not a regular file"):
        open_store(tmp_path).get("folder")
    with pytest.raises(StorageError):
        open_store(Path("/proc/self")).put("x", b"")


@pytest.mark.parametrize(
    "url",
    [
        "nope://bucket/x",
        "s3://",
        "mem://",
        "file://host/x",
        f"https://user:{SECRET}@host/x",
        f"https://host/x?sig={SECRET}",
    ],
)
def test_a_url_that_nothing_reads_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(UnsupportedURLError) as caught:
        open_store(url)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", {"no_such_option": 1}),
        ("s3://b", {"key": "a", "access_key": "b"}),
        ("https://h/x", {"region": "x"}),
        ("mem://b", {"region": "x"}),
        ("/tmp", {"region": "x"}),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedURLError, match=next(iter(options)) + "|access_key_id"):
        open_store(url, storage_options=options)


def test_friendly_names_become_those_of_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    config, client = configure(
        "s3", {"endpoint_url": "http://h:1", "key": "a", "secret": "b", "token": None, "timeout_s": 1.5}
    )
    assert config == {
        "endpoint": "http://h:1",
        "access_key_id": "a",
        "secret_access_key": "b",
        "region": config["region"],
    }
    assert client["allow_http"] is True
    assert client["timeout"] == "1500ms"


@pytest.mark.parametrize(
    "options", [{"secret_key": SECRET}, {"sas_key": SECRET}, {"default_headers": {"Authorization": SECRET}}]
)
def test_an_error_that_quotes_a_secret_is_scrubbed_with_its_cause(options: dict[str, Any]) -> None:
    translator = Translator("s3://b", find_secrets(options))
    foreign = OSError(f"failed at https://h/x?sig=abc with {SECRET}")
    error = translator.translate(foreign, "x")
    assert SECRET not in str(error)
    assert "abc" not in str(error)
    assert translator.cause(foreign) is None
    assert translator.cause(OSError("harmless")) is not None


def test_a_password_in_the_url_of_another_file_system_is_not_shown() -> None:
    store = open_client(f"memory://user:{SECRET}@host/x")
    assert SECRET not in store.url + repr(store)
    with pytest.raises(NotFoundError) as caught:
        store.get("none")
    assert SECRET not in str(caught.value)


def test_a_pickled_store_shows_no_secret_when_printed() -> None:
    store = open_store("s3://b", storage_options={"access_key": "a", "secret_key": SECRET})
    assert SECRET not in repr(pickle.loads(pickle.dumps(store)))


@pytest.mark.parametrize(
    ("url", "folder", "key"),
    [
        ("s3://b/x/y/a.tar", "s3://b/x/y", "a.tar"),
        ("s3://b/a.tar", "s3://b", "a.tar"),
        ("s3://b", "s3://b", ""),
        ("s3://b/x/", "s3://b/x", ""),
        ("/data/a.tar", "/data", "a.tar"),
        ("/a.tar", "/", "a.tar"),
        ("a.tar", ".", "a.tar"),
        ("file:///data/a.tar", "file:///data", "a.tar"),
        ("file:///a.tar", "file:///", "a.tar"),
    ],
)
def test_the_url_of_an_object_is_cut_into_folder_and_key(url: str, folder: str, key: str) -> None:
    assert split_url(url) == (folder, key)


def test_a_cause_with_a_password_is_not_chained_to_an_error_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_client("memory://host/x", {"password": SECRET})

    def fail(*_: object, **__: object) -> None:
        try:
            raise OSError(f"login with {SECRET} failed")
        except OSError as exc:
            raise ConnectionError("connection lost") from exc

    monkeypatch.setattr(store._fs, "cat_file", fail)  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailableError, match="connection lost") as caught:
        store.get("a")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "said",
    [
        f"x-amz-security-token: {SECRET}",
        f"Authorization: Bearer {SECRET} x-y: z",
        f"Authorization: AWS4-HMAC-SHA256 Credential={SECRET}/2026/s3, SignedHeaders=host, Signature={SECRET}",
        f"X-Api-Key : {SECRET}",
        f"<Cookie>cookie: {SECRET}</Cookie>",
    ],
)
def test_what_a_server_says_of_the_headers_that_it_got_is_left_out(said: str) -> None:
    translator = Translator("s3://b", frozenset())
    foreign = OSError(f"status code: 400 {said}")
    error = translator.translate(foreign, "a")
    assert SECRET not in str(error)
    assert "the server refuses the request" in str(error)
    assert translator.cause(foreign) is None
