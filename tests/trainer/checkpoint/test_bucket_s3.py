"""Checkpoints on a real S3 server: SIGKILL at every request of saves, ranks that share no disk."""

from __future__ import annotations

import http.client
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from launch_ranks import Ranks, run_ranks
from rewound_runs import batches_to_rows, going_back, train
from saved_nets import assert_same, build, fill, step_once, whole_state

from penstock import open_store
from penstock.storage import AccessDeniedError, Store
from penstock.storage.clients.remote import RemoteStore
from penstock.trainer import CheckpointConfig, CheckpointError, World, export_safetensors
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote.layout import list_stored, read_stored
from penstock.trainer.checkpoint.remote.lock import LOCK_KEY

RANKS_AT_ONCE = 6


class KillingProxy:
    """Passes requests on to an S3 server; when it has the answer to number ``kill_at``, it kills instead of giving it.

    Counted are the requests since the process that is to be killed asked for the path ``/begin``.
    """

    def __init__(self, endpoint: str, kill_at: int) -> None:
        self.requests = 0
        self.pid: int | None = None
        self._kill_at = kill_at
        self._counts = False
        self._lock = threading.Lock()
        proxy, upstream = self, urlsplit(endpoint).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                if self.path == "/begin":
                    proxy._counts = True
                    self.send_response(204)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server = http.client.HTTPConnection(upstream, timeout=60)
                server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    server.putheader(name, value)
                server.endheaders(body)
                answer = server.getresponse()
                content = answer.read()
                server.close()
                if proxy.counts_to_kill():
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"transfer-encoding", "connection", "date", "server"}:
                        self.send_header(name, value)
                if answer.getheader("Content-Length") is None and answer.status != 204:
                    self.send_header("Content-Length", str(len(content)))  # it came in chunks
                self.end_headers()
                self.wfile.write(content)

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.handle_any)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def counts_to_kill(self) -> bool:
        with self._lock:
            if not self._counts:
                return False
            self.requests += 1
            if self.requests != self._kill_at or self.pid is None:
                return False
            os.kill(self.pid, signal.SIGKILL)
            return True

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def kept_in(endpoint: str, options: dict[str, Any]) -> Iterator[None]:
    """What a run takes from its environment."""
    values = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": options["access_key"],
        "AWS_SECRET_ACCESS_KEY": options["secret_key"],
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def named_keys(store: Store) -> list[str]:
    keys = []
    for step in list_stored(store):
        stored = read_stored(store, step)
        keys += [f"manifests/step-{step}.json"]
        keys += [part.key for name in stored.parts for part in stored.parts_of(name)]
    return sorted(keys)


def _save_and_die(world: World, url: str, address: str, options: dict[str, Any]) -> None:
    """Resume from step 1, save step 2 which replaces it, and save step 2 again with other weights and a metric."""
    with kept_in(f"http://{address}", options):
        net, optimizer = build()
        checkpoints = Checkpointer(CheckpointConfig(folder=url, keep_last=1), world)
        assert checkpoints.load_newest(net, optimizer) == (1, {"state": 1})
        begin = http.client.HTTPConnection(address)
        begin.request("GET", "/begin")
        begin.getresponse().read()
        for state, metric in ((2, None), (3, 0.5)):
            fill(net, float(state))
            checkpoints.save(2, net, optimizer, {"state": state}, metric=metric)
        checkpoints.close()


def _resume_each(world: World, urls: list[str], options: dict[str, Any]) -> list[Any]:
    return [_resume(world, url, options, saves=number % 3 == 0) for number, url in enumerate(urls)]


def _resume(world: World, url: str, options: dict[str, Any], *, saves: bool) -> Any:
    """What the next run finds: the state, what is not as it should be, and whether it can save."""
    with kept_in(options["endpoint"], options):
        net, optimizer = build()
        store = open_store(url)
        with Checkpointer(CheckpointConfig(folder=url, keep_last=1), world) as checkpoints:
            wrong = sorted(
                {info.key for info in store.list()} ^ {*named_keys(store), LOCK_KEY}
            )  # left over, or missing
            found = checkpoints.load_newest(net, optimizer)
            assert found is not None
            wrong += list(checkpoints.passed_over.values())
            weights = {float(tensor.detach().flatten()[0]) for tensor in net.parameters()}
            if weights != {float(found[1]["state"])}:
                wrong.append(f"weights {weights} in {found}")
            if read_stored(store, found[0]).manifest.metric != {1: None, 2: None, 3: 0.5}[found[1]["state"]]:
                wrong.append("another save's metric")
            if saves:
                checkpoints.save(7, net, optimizer, {}, blocking=True)
        if saves and ([info.key for info in store.list()] != named_keys(store) or list_stored(store) != [7]):
            wrong.append("the next save")
        store.close()
        return found[1]["state"], wrong


@pytest.mark.full
def test_a_kill_at_any_request_of_a_save_leaves_a_whole_checkpoint_and_no_leftovers(
    s3_url: tuple[str, dict[str, Any]],
) -> None:
    """Saves of a new step, of a step again, and the deletions after both; weights, ``extra`` and metric all differ."""
    url, options = s3_url
    assert run_ranks(_save_first, 1, f"{url}/base", options) == [None]
    base = open_store(f"{url}/base", storage_options=options)
    objects = {info.key: bytes(base.get(info.key)) for info in base.list()}
    base.close()

    def start(kill_at: int) -> tuple[Ranks, KillingProxy]:
        copy = open_store(f"{url}/{kill_at}", storage_options=options)
        for key, data in objects.items():
            copy.put(key, data)
        copy.close()
        proxy = KillingProxy(options["endpoint"], kill_at)
        ranks = Ranks(_save_and_die, 1, f"{url}/{kill_at}", proxy.address, options)
        proxy.pid = ranks.processes[0].pid
        return ranks, proxy

    unbroken, proxy = start(0)
    assert unbroken.join(60.0)[0].exit_code == 0
    proxy.close()
    requests = proxy.requests
    assert requests >= 24
    kills = 0
    for first in range(1, requests + 1, RANKS_AT_ONCE):
        killed = [start(kill_at) for kill_at in range(first, min(first + RANKS_AT_ONCE, requests + 1))]
        for ranks, proxy in killed:
            exit_code = ranks.join(60.0)[0].exit_code
            proxy.close()
            assert exit_code in (-signal.SIGKILL, 0)
            kills += exit_code != 0
    assert kills >= requests - 4, (
        "a slow machine repeats a read or renews the lock, so that runs differ by few requests"
    )
    thirds = [[f"{url}/{kill_at}" for kill_at in range(first, requests + 1, 3)] for first in (1, 2, 3)]
    resuming = [Ranks(_resume_each, 1, urls, options) for urls in thirds]
    found: dict[int, int] = {}
    for first, ranks in enumerate(resuming, 1):
        (outcome,) = ranks.join(120.0)
        assert outcome.exit_code == 0, getattr(outcome.value, "trace", None)
        for kill_at, (state, wrong) in zip(range(first, requests + 1, 3), outcome.value, strict=True):
            assert not wrong, f"after a kill at request {kill_at} of {requests}: {wrong}"
            found[kill_at] = state
    assert set(found.values()) == {1, 2, 3}
    assert (found[1], found[requests]) == (1, 3)


def _save_first(world: World, url: str, options: dict[str, Any]) -> None:
    with kept_in(options["endpoint"], options):
        net, optimizer = build()
        fill(net, 1.0)
        with Checkpointer(CheckpointConfig(folder=url), world) as checkpoints:
            checkpoints.save(1, net, optimizer, {"state": 1})


def _save_with_a_rank_that_cannot(world: World, url: str, options: dict[str, Any]) -> Any:
    put = RemoteStore.put

    def put_or_fail(store: RemoteStore, key: str, data: Any) -> Any:
        if world.rank == 1 and "step-2." in key:
            raise AccessDeniedError(f"{key}: access denied")
        return put(store, key, data)

    with kept_in(options["endpoint"], options):
        net, optimizer = build(2)
        with Checkpointer(CheckpointConfig(folder=url), world) as checkpoints:
            RemoteStore.put = put_or_fail  # type: ignore[method-assign]
            for step in (1, 2, 3):
                checkpoints.save(step, net, optimizer, {})
            notes = checkpoints.take_notes()
        with closing(open_store(url)) as store:
            left = {info.key for info in store.list()} - {
                LOCK_KEY,
                *named_keys(store),
            }  # rank 0 may not have closed yet
            steps = list_stored(store)
        dist.barrier()
        if world.rank == 1:
            tempfile.tempdir = "/no/such/folder"
        with Checkpointer(CheckpointConfig(folder=url), world) as checkpoints:
            try:
                checkpoints.load_newest(net, optimizer)
            except CheckpointError as exc:
                return notes, steps, left, str(exc)
        raise AssertionError("a rank has nowhere to fetch to")


def test_what_fails_on_one_rank_is_known_to_all_and_the_next_save_succeeds(
    s3_url: tuple[str, dict[str, Any]],
) -> None:
    for notes, steps, left, resumed in run_ranks(_save_with_a_rank_that_cannot, 2, s3_url[0], s3_url[1]):
        assert len(notes) == 1
        assert re.match(r"step 2 could not be saved to s3://.*: rank 1: .*access denied; training continues", notes[0])
        assert steps == [3, 1]
        assert not left
        assert re.match(r"s3://.*/step-3 cannot be loaded: rank 1: .*/no/such/folder", resumed)


def _continue_on_nodes(world: World, url: str, options: dict[str, Any], folder: str, zero: int) -> Any:
    """As `test_checkpoint_faults.py` does on a shared disk; here each rank has a disk of its own."""
    own = Path(folder) / f"node-{world.rank}"
    own.mkdir(exist_ok=True)
    tempfile.tempdir = str(own)
    with kept_in(options["endpoint"], options):
        net, optimizer = build(zero)
        with Checkpointer(CheckpointConfig(folder=url), world) as checkpoints:
            found = checkpoints.load_newest(net, optimizer)
            mine = {name: value.tolist() for name, value in checkpoints.load_rank_state().items()}
            loaded = whole_state(net, optimizer) if found else {}
            step = found[0] if found else 0
            step_once(net, optimizer, seed=step)
            saved = whole_state(net, optimizer)
            owed = torch.tensor([float(world.rank)])
            checkpoints.save(step + 1, net, optimizer, {"position": step}, rank_state={"owed": owed})
        left = list(own.glob("penstock-checkpoint-*"))
    return found, mine, loaded, saved, left


def test_ranks_without_a_shared_disk_continue_at_other_world_sizes_and_zero_stages(
    s3_url: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, options = f"{s3_url[0]}/a run", s3_url[1]
    before: Any = None
    for step, (ranks, zero) in enumerate([(3, 0), (2, 3), (2, 2)]):
        results = run_ranks(_continue_on_nodes, ranks, url, options, str(tmp_path), zero)
        assert all(found == (None if step == 0 else (step, {"position": step - 1})) for found, *_ in results)
        if before is not None:
            assert_same(results[0][2], before)
        assert [mine for _, mine, *_ in results] == ([{"owed": [0.0]}, {"owed": [1.0]}] if step == 2 else [{}] * ranks)
        assert not any(left for *_, left in results)
        before = results[0][3]
    with kept_in(options["endpoint"], options):
        export_safetensors(f"{url}/step-3", tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size > 0


def _go_back(world: World, url: str, options: dict[str, Any], folder: str) -> Any:
    """A run on disk; the same one on the server; and there again, broken off after the rewind and gone on with."""
    bad = batches_to_rows(14)
    with kept_in(options["endpoint"], options):
        runs = []
        for name, place in (("disk", "checkpoints"), ("found", f"{url}/found")):
            shared = {**going_back(place), "parallel": {"zero": 3}}
            runs.append(train(world, f"{folder}/{name}", steps=20, bad=bad, **shared))
        shared = {**going_back(f"{url}/broken"), "parallel": {"zero": 3}}
        broken = train(world, f"{folder}/broken", steps=20, bad=bad, fail_at=(10, 1), **shared)
        with closing(open_store(f"{url}/broken")) as store:
            steps = list_stored(store)
        dist.barrier()
        runs.append(train(world, f"{folder}/broken", steps=20, bad=bad, **shared))
        with closing(open_store(f"{url}/found")) as store:
            left = {info.key for info in store.list()} - {LOCK_KEY, *named_keys(store)}
    return [(one.rewinds, one.state, one.average) for one in runs], (broken.error, steps), left


def test_training_goes_back_to_a_checkpoint_there_and_a_restart_knows_of_it(
    s3_url: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    for (disk, found, resumed), broken, left in run_ranks(_go_back, 2, *s3_url, str(tmp_path)):
        assert disk[0] == 1
        assert found == disk
        assert resumed == disk
        assert broken == ("ZeroDivisionError", [8, 4])
        assert not left
