"""Servers and stores that the tests of storage share."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from free_port import free_port
from missing_server import skip_or_fail_in_ci

NGINX_CONF = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1000; }}
http {{
  access_log off; client_max_body_size 1g; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port}; root {folder}/www;
    location / {{ autoindex on; dav_methods PUT DELETE; create_full_put_path on; }}
    location /blind/ {{ autoindex off; dav_methods PUT; }}
    location /busy/ {{ return 503; }}
    location /broken/ {{ return 500; }}
    location /denied/ {{ return 403; }}
    location = /own-token {{ return 200 {token}; }}
  }}
}}
"""


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """http.server with what it lacks: ranges, ETags, PUT, and the error folders of the nginx above."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _refuse(self) -> bool:
        status = {"busy": 503, "broken": 500, "denied": 403}.get(self.path.split("/")[1])
        if status is None and (self.path.strip("/") == "blind"):
            status = 403
        if status is not None:
            self.send_error(status)
        return status is not None

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_PUT(self) -> None:
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        path = Path(self.translate_path(self.path))
        self.send_response(204 if path.is_file() else 404)
        path.unlink(missing_ok=True)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, *, with_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        if self._refuse():
            return
        if path.is_dir():
            super().do_GET() if with_body else super().do_HEAD()
            return
        if not path.is_file():
            self.send_error(404)
            return
        data, status = path.read_bytes(), path.stat()
        etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        if self.headers.get("If-Match") not in {None, etag}:
            self.send_error(412)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
        if found and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", etag)
        self.send_header("Last-Modified", self.date_time_string(int(status.st_mtime)))
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if with_body:
            self.wfile.write(data[start:stop])


@contextlib.contextmanager
def serve_python(www: Path) -> Iterator[str]:
    def make(*args: object) -> RangeHandler:
        return RangeHandler(*args, directory=str(www))  # type: ignore[arg-type]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serve_nginx(folder: Path) -> Iterator[str]:
    port, token = free_port(), uuid4().hex
    (folder / "nginx.conf").write_text(
        ("user root;" if os.geteuid() == 0 else "") + NGINX_CONF.format(folder=folder, port=port, token=token)
    )
    server = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while _ask(f"http://127.0.0.1:{port}/own-token") != token:
            if server.poll() is not None or time.monotonic() > until:
                log = folder / "error.log"
                raise RuntimeError(f"nginx does not answer: {log.read_text() if log.exists() else 'it left no log'}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def _ask(url: str) -> str:
    """What a server answers; nothing where none does."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())
    return ""


@pytest.fixture(autouse=True)
def _own_throttle_marks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what one process tells the others of the node out of this machine's folder for it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))


def _make_www(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web")
    (folder / "www" / "blind").mkdir(parents=True)
    return folder


@pytest.fixture(scope="session")
def nginx_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an nginx with ranges, PUT and index pages, and folders that answer with errors."""
    if not shutil.which("nginx"):
        skip_or_fail_in_ci("no nginx: apt-get install nginx-light; the same tests run on Python's http.server")
    with serve_nginx(_make_www(tmp_path_factory)) as url:
        yield url


@pytest.fixture(scope="session")
def python_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same on Python's http.server, which is always there."""
    with serve_python(_make_www(tmp_path_factory) / "www") as url:
        yield url


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A bucket in memory that is dropped after the test."""
    from penstock.storage import MemoryStore

    url = f"mem://{uuid4().hex}"
    MemoryStore(url).create()
    yield url
    MemoryStore(url).drop()
