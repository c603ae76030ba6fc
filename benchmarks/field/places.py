"""Places of the workloads: the local disk, or an S3 server, straight, behind a line that delays, or behind TLS."""

from __future__ import annotations

import contextlib
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ...loader.errors import ConfigError
from ...storage import Store, open_store
from ..contenders import LIMIT, OURS, base_of
from ..harness.job import Job
from ..peers.catalogue import PEERS
from ..stores.delay_line import delay_line
from ..stores.server import make_bucket, serve_s3
from ..stores.tls_line import tls_line
from .cells import StoreName

_BUCKET = "penstock-bench"
_UPLOADS = 4


class Places:
    """The stores of one run of the bench. The S3 server is started when it is first needed; ``close`` ends it.

    Mutable state: the server and the lines, once started, or the error that starting the server ended with.
    """

    def __init__(self, delay_ms: float, say: Callable[[str], None]) -> None:
        self._delay_s, self._say = delay_ms / 1000, say
        self._open = contextlib.ExitStack()
        self._options: dict[str, str] | None = None
        self._failed: ConfigError | None = None
        self._late_url = ""
        self._tls: dict[str, str] = {}

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def options_of(self, store: StoreName) -> dict[str, str]:
        """The storage options of a store.

        Raises:
            ConfigError: there is no S3 server, or it does not answer; says what to do.
        """
        if store == "local":
            return {}
        options = self._serve()
        if store == "s3":
            return options
        if store == "s3-tls":
            self._tls = self._tls or self._open.enter_context(tls_line(options["endpoint"]))
            return options | self._tls
        if not self._late_url:
            if not options["endpoint"].startswith("http://"):
                raise ConfigError("the line that delays takes plain http:// only, and this S3 server is none")
            self._late_url = self._open.enter_context(delay_line(options["endpoint"], self._delay_s))
        return options | {"endpoint": self._late_url}

    def _serve(self) -> dict[str, str]:
        if self._failed is not None:
            raise self._failed
        if self._options is None:
            self._say("starting the S3 server")
            try:
                options = self._open.enter_context(serve_s3())
                make_bucket(_BUCKET, options)
            except (ConfigError, urllib.error.URLError, OSError) as exc:
                if isinstance(exc, urllib.error.HTTPError) and exc.code == 409:  # it is there
                    self._options = options
                    return options
                reason = str(exc) if isinstance(exc, ConfigError) else f"the S3 server does not answer as one ({exc})"
                self._failed = ConfigError(reason)
                raise self._failed from exc
            self._options = options
        return self._options

    @contextlib.contextmanager
    def uploaded(self, folder: Path, jobs: Mapping[str, Job]) -> Iterator[dict[str, Job]]:
        """The jobs on copies in S3 of the data set and of the peers' conversions, which are removed at the end.

        Contenders that have no way to read from S3 are left out.
        """
        options = self._serve()
        data = f"s3://{_BUCKET}/{folder.name}"
        placed: dict[str, Job] = {}
        with contextlib.ExitStack() as stores:
            for name, job in jobs.items():
                base = base_of(name)
                if base in PEERS and "s3" in PEERS[base].lacks:
                    continue
                own = str(job.url) != str(folder) and base not in (OURS, LIMIT)
                url = f"{data}.{base}" if own else data
                if url not in {each.url for each in placed.values()}:
                    self._say(f"{name}: uploading")
                    stores.enter_context(_copied(open_store(str(job.url)), open_store(url, storage_options=options)))
                placed[name] = replace(job, url=url, storage_options=options)
            yield placed


@contextlib.contextmanager
def _copied(source: Store, target: Store) -> Iterator[None]:
    """Copies that are removed at the end, also where that is an error or an interrupt."""
    with contextlib.closing(source), contextlib.closing(target):
        keys = [info.key for info in source.list()]
        try:
            with ThreadPoolExecutor(_UPLOADS) as pool:
                list(pool.map(lambda key: target.put(key, source.get(key)), keys))
            yield
        finally:
            target.delete(keys)
