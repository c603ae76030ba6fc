"""Keys that no store reads, as ``train//a.tar``: a listing goes on without them, by every kind of access."""

from __future__ import annotations

import hashlib
import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from uuid import uuid4

import pytest
from odd_objects import put_odd

from penstock.storage import StorageError, UnsupportedURLError, open_store
from penstock.storage.clients import odd_keys

PAGE = 3
ODD = ["t//notes.md", "t/./a", "t/../b", "t/x//y", "t/new\nline", "t/tab\t", "t/\x01", "t/del\x7f"]
# Every one of these is a name that S3 and obstore both have.
USUAL = ["a b", "b ", " c", "%41", "a%2Fb", "\xfc", "a?b", "a#b", "a\\b", "a*", "a[0]", "a&b", "a<b", "a+b", "a'b",
         'a"b', "a{b}", "a=b", "~", "...", ".hidden", "\U0001f600", "x/y/z"]  # fmt: skip


class Bucket(http.server.ThreadingHTTPServer):
    """A bucket "b" in memory, which is listed by pages of three keys; ``asked`` are the queries of listings."""

    daemon_threads = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.asked = objects, list[dict[str, str]]()
        self.options: dict[str, Any] = {"endpoint": f"http://127.0.0.1:{self.server_port}"}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Bucket

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        key, query = unquote(parts.path).removeprefix("/b").removeprefix("/"), dict(parse_qsl(parts.query))
        if key:
            return self._answer(200 if key in self.server.objects else 404, self.server.objects.get(key, b""))
        self.server.asked.append(query)
        after = query.get("continuation-token", "")
        keys = [key for key in sorted(self.server.objects) if key.startswith(query.get("prefix", "")) and key > after]
        is_encoded = query.get("encoding-type") == "url"
        body = f"<ListBucketResult><IsTruncated>{str(len(keys) > PAGE).lower()}</IsTruncated>"
        body += "<EncodingType>url</EncodingType>" if is_encoded else ""
        for key in keys[:PAGE]:
            name = quote(key, safe="/") if is_encoded else key.replace("&", "&amp;").replace("<", "&lt;")
            data = self.server.objects[key]
            body += f"<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            body += f"<ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag><Size>{len(data)}</Size></Contents>"
        if len(keys) > PAGE:
            body += "<NextContinuationToken>"
            body += keys[PAGE - 1].replace("&", "&amp;").replace("<", "&lt;") + "</NextContinuationToken>"
        return self._answer(200, (body + "</ListBucketResult>").encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(odd_keys, "_warned", set())
    with Bucket({f"t/{name}": name.encode() for name in USUAL}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def signed(bucket: Bucket) -> dict[str, Any]:
    return bucket.options | {"access_key": "key", "secret_key": "secret"}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("odd", ODD)
def test_a_bucket_is_listed_whole_beside_a_key_that_no_store_reads(
    bucket: Bucket, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_store("s3://b/t/", storage_options=signed(bucket))) as store:
        expected = list(store.list())
        bucket.objects[odd] = b"odd"
        with caplog.at_level(logging.WARNING, "penstock"):
            assert list(store.list()) == list(store.list()) == expected
        assert {info.key for info in expected} == set(USUAL)
        assert all(bytes(store.get(info.key)) == info.key.encode() for info in expected)
    (said,) = [record.getMessage() for record in caplog.records]
    assert repr(odd.removeprefix("t/")) in said
    assert "rename them" in said


@pytest.mark.slow
def test_markers_of_folders_are_left_out_without_a_warning(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    with closing(open_store("s3://b/t/", storage_options=signed(bucket))) as store:
        expected = list(store.list())
        bucket.objects |= {"t/": b"", "t//": b"", "t/x//": b"", "t/x/": b""}
        with caplog.at_level(logging.WARNING, "penstock"):
            assert list(store.list()) == expected
    assert not caplog.records


@pytest.mark.parametrize("prefix", ["x", "x/y/", "a", "none/"])
def test_a_part_of_a_bucket_is_listed_beside_odd_keys_as_without(bucket: Bucket, prefix: str) -> None:
    with closing(open_store("s3://b/t/", storage_options=signed(bucket))) as store:
        expected = list(store.list(prefix))
        bucket.objects |= dict.fromkeys(["t/x//1", "t/x/y//1", "t//", "t/a//1"], b"odd")
        assert list(store.list(prefix)) == expected


def test_public_buckets_are_listed_beside_odd_keys_without_a_signature(bucket: Bucket) -> None:
    bucket.objects["t//odd"] = b"odd"
    with closing(open_store("s3://b/t/", storage_options=bucket.options | {"anonymous": True})) as store:
        assert {info.key for info in store.list()} == set(USUAL)
    assert not any("X-Amz-Signature" in query for query in bucket.asked)


def test_requests_for_odd_listings_are_paid_for_where_that_is_said(bucket: Bucket) -> None:
    bucket.objects["t//odd"] = b"odd"
    with closing(open_store("s3://b/t/", storage_options=signed(bucket) | {"request_payer": True})) as store:
        assert {info.key for info in store.list()} == set(USUAL)
    assert bucket.asked[-1]["x-amz-request-payer"] == "requester"


def test_a_url_with_a_part_that_no_store_reads_is_refused_in_words(bucket: Bucket) -> None:
    for url in ("s3://b/t//a.tar/", "s3://b/t/./a/", "s3://b/t/../a/", "s3://b/t\n/"):
        with pytest.raises(UnsupportedURLError, match=r"empty, '.' or '..' part .* check the URL"):
            open_store(url, storage_options=signed(bucket))


def test_clouds_whose_listings_end_at_an_odd_key_say_what_to_do(bucket: Bucket) -> None:
    """Google's listings are S3's, but for the names of parameters that this server does not look at."""
    bucket.objects["t//odd"] = b"odd"
    options = {"anonymous": True, "base_url": bucket.options["endpoint"], "allow_http": True}
    with (
        closing(open_store("gs://b/t/", storage_options=options)) as store,
        pytest.raises(StorageError, match=r"t//odd.* rename or delete .* brace pattern"),
    ):
        list(store.list())


@pytest.mark.s3
def test_a_real_server_is_listed_whole_beside_odd_keys(
    s3_url: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    url, options = s3_url
    place = f"t-{uuid4().hex[:6]}"
    with closing(open_store(f"{url}/{place}", storage_options=options)) as store:
        for name in USUAL:
            store.put(name, name.encode())
        expected = list(store.list())
        assert {info.key for info in expected} == set(USUAL)
        for folder, name in ((f"{place}/", "notes.md"), (f"{place}/new\nline", "1"), (f"{place}/x//y", "2")):
            put_odd(options, url.removeprefix("s3://"), folder, name)
        with caplog.at_level(logging.WARNING, "penstock"):
            assert list(store.list()) == expected
    (said,) = [record.getMessage() for record in caplog.records]
    assert "'/notes.md', 'new\\nline/1', 'x//y/2'" in said
