"""TLS in front of a server that speaks plain HTTP, by nginx: clouds speak nothing else."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from ...loader.errors import ConfigError

_STARTS_WITHIN_S = 30.0
_MAKE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
# An authority and what it signs: some libraries take no certificate that is both.
_CERTIFICATES = (
    f"{_MAKE} -subj /CN=penstock-bench -keyout ca.key -out ca.pem",
    (
        f"{_MAKE} -subj /CN=127.0.0.1 -CA ca.pem -CAkey ca.key -addext basicConstraints=CA:FALSE "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    ),
)
# Host as the client signed it, and keys with escapes as they came: proxy_pass has no path.
_SETTINGS = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 0; proxy_buffering off; proxy_request_buffering off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream server {{ server {upstream}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} ssl; keepalive_requests 1000000;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
    location / {{
      proxy_pass http://server; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host $http_host;
    }}
  }}
}}
"""


@contextmanager
def tls_line(upstream: str) -> Iterator[dict[str, str]]:
    """Storage options of a TLS server in front of ``upstream`` (http://host:port), which ends with the context.

    Raises:
        ConfigError: ``upstream`` is no such URL, nginx or openssl is missing, or nginx does not start.
    """
    parts = urlsplit(upstream)
    if parts.scheme != "http" or parts.hostname is None:
        raise ConfigError(f"{upstream}: TLS can be put before plain http:// only")
    for program in ("nginx", "openssl"):
        if not shutil.which(program):
            raise ConfigError(f"{program} is not installed, which puts TLS before the S3 server: apt-get install it")
    with TemporaryDirectory(prefix="penstock-tls-") as made:
        folder = Path(made)
        for make in _CERTIFICATES:
            subprocess.run(make.split(), cwd=folder, check=True, capture_output=True, timeout=60)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings = _SETTINGS.format(folder=folder, port=port, upstream=f"{parts.hostname}:{parts.port or 80}")
        (folder / "nginx.conf").write_text(settings)
        command = ["nginx", "-p", made, "-c", "nginx.conf", "-e", "error.log"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as server:
            try:
                _wait(server, port, folder / "error.log")
                yield {"endpoint": f"https://127.0.0.1:{port}", "root_certificate": (folder / "ca.pem").read_text()}
            finally:
                server.terminate()


def trust(options: Mapping[str, str], folder: str) -> dict[str, str]:
    """Environment variables with which other libraries trust the certificate of these storage options, if any.

    It is written into ``folder``.
    """
    if "root_certificate" not in options:
        return {}
    path = Path(folder, "trusted.pem")
    path.write_text(options["root_certificate"])
    return dict.fromkeys(("AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), str(path))


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server listens."""
    until = time.monotonic() + _STARTS_WITHIN_S
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    said = log.read_text().strip()[-300:] if log.exists() else ""
    raise ConfigError(f"nginx does not put TLS before the S3 server: {said or 'it says nothing'}")
