"""A loader whose pipeline runs in a process of its own: the same batches, positions and errors, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import row_functions
import torch
from beside_loader import SIZES, ids, loader_threads, nothing_left, open_loader, processes, quickly, tars
from equal_batches import assert_equal
from started_process import started_process

from penstock import Mixture, Source, audit
from penstock.loader import BadSampleWarning
from penstock.loader.decoding.workers import process as worker_process
from penstock.loader.errors import ConfigError, LoaderClosedError, WorkerError
from penstock.loader.pipeline.beside import process as loader_process
from penstock.storage import MemoryStore

__all__ = ["nothing_left", "quickly", "tars"]


def move_about(source: str, place: str) -> list[Any]:
    """What a loader hands out, and where it says that it is, while its position is moved in every way."""
    seen: list[Any] = []

    def take(count: int) -> None:
        seen.extend(ids(next(batches)) for _ in range(count))
        seen.append(loader.state_dict())

    with open_loader(source, place, rank=1, world_size=2, last_batch="pad") as loader:
        batches = iter(loader)
        take(3)
        state = loader.state_dict()
        loader.set_batch_size(4)
        take(3)
        loader.set_shares([1.0, 3.0])
        take(2)
        loader.seek(1, 3)
        seen.append(ids(loader.peek()))
        batches = iter(loader)
        take(2)
        loader.load_state_dict(state)
        seen.extend(map(ids, batches))  # in another epoch, so that it ends
        seen.extend(map(ids, loader))
        loader.set_epoch(5)
        batches = iter(loader)
        take(1)
        batches = iter(loader)  # the same epoch anew
        take(1)
        loader.skip_batches(3)
        seen.extend(map(ids, loader))
        seen.append(loader.state_dict())
        metrics = loader.metrics()
        seen.append((metrics.batches, metrics.samples))
    return seen


def mix(source: str, place: str) -> list[Any]:
    seen: list[Any] = []
    mixture = Mixture({"a": Source(source, weight=0.5), "b": Source(source, weight=0.5)}, stop="first_exhausted")
    with open_loader(mixture, place) as loader:
        batches = iter(loader)
        seen += [ids(next(batches)) for _ in range(4)]
        loader.set_weights({"a": 0.7})
        seen += [ids(next(batches)) for _ in range(4)]
        loader.set_batch_size(6)
        seen += [ids(next(batches)) for _ in range(4)]
        state = loader.state_dict()
        seen += [*map(ids, batches), *map(ids, loader), loader.state_dict()]
        metrics: Any = loader.metrics()
        seen.append((metrics.run_samples, metrics.sources["a"].samples))
        loader.load_state_dict(state)
        seen += map(ids, loader)
    return seen


@pytest.mark.slow
def test_batches_are_those_of_threads_and_no_thread_makes_them_here(tars, tmp_path):
    options = {"batch_size": 16, "transform": row_functions.augment, "last_batch": "pad"}
    with open_loader(tars, "threads", **options) as loader:
        expected = [*loader, *loader]
    with open_loader(tars, audit_dir=tmp_path / "audit", **options) as loader:
        found = [*loader, *loader]
        assert loader_threads() == []
        seen = loader.metrics()
        assert processes() == [seen.loader_process]
        assert "a process of its own, beside this one (as given)" in loader.describe()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    assert (seen.batches, seen.samples) == (len(found), 2 * sum(SIZES))
    assert seen.decoded_rows >= seen.samples
    assert seen.fetched_bytes > 0
    assert loader.metrics().decoded_rows >= seen.decoded_rows
    assert audit(tmp_path / "audit").is_exact


def drop_and_skip(source: str, place: str) -> list[Any]:
    seen: list[Any] = []
    mixture = Mixture({"all": Source(source), "some": Source(source, keep=row_functions.is_even)}, stop="all_exhausted")
    for data, options in (
        (source, {"keep": row_functions.is_even, "on_error": "skip", "max_errors": 3}),
        (mixture, {"batch_size": 12}),
        (source, {"on_error": "replace", "max_errors": 3}),
    ):
        given = {"transform": row_functions.fail_at_seven} if data is source else {}
        with open_loader(data, place, last_batch="partial", **given, **options) as loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = iter(loader)
            seen.extend((ids(next(batches)), loader.state_dict()) for _ in range(4))
            state = loader.state_dict()
            seen.extend((ids(batch), loader.state_dict()) for batch in batches)
            seen.extend((ids(batch), loader.state_dict()) for batch in loader)
            loader.load_state_dict(state)
            seen.extend(map(ids, loader))
            loader.set_epoch(0)
            loader.set_batch_size(5)
            seen.extend(map(ids, loader))
            seen.append([(entry.id, entry.step, entry.reason, entry.epoch) for entry in loader.bad_samples])
            metrics: Any = loader.metrics()
            seen.append((metrics.batches, metrics.samples, getattr(metrics, "sources", None)))
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("play", [move_about, mix, drop_and_skip])
def test_a_position_moves_as_that_of_threads_does(tars, play):
    assert play(tars, "process") == play(tars, "threads")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_in_batches_that_a_new_pass_drops_are_known_to_the_loader_and_its_audit(tars, tmp_path, on_error):
    options: dict[str, Any] = {"on_error": on_error, "max_errors": 99, "shuffle": False, "last_batch": "partial"}
    with open_loader(tars, transform=row_functions.fail_on_every_fifth, audit_dir=tmp_path, **options) as loader:
        next(iter(loader))
        while loader.metrics().ready_batches < 3:  # bad samples are in batches that nobody will take
            time.sleep(0.01)
        delivered = [number for batch in loader for number in ids(batch)]
        bad = sorted(entry.id for entry in loader.bad_samples)
    assert bad == list(range(0, sum(SIZES), 5))
    assert on_error == "replace" or sorted({*delivered, *bad}) == list(range(sum(SIZES)))
    report = audit(tmp_path)
    assert report.is_exact
    assert (report.epochs[0].bad, report.epochs[0].dropped) == (0 if on_error == "replace" else len(bad), 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_an_error_keeps_its_type_cause_and_place_and_is_met_again(tars):
    with open_loader(tars, transform=row_functions.fail_at_seven, shuffle=False, batch_size=4) as loader:
        batches = iter(loader)
        assert next(batches)["txt"] == ["0", "1", "2", "3"]
        for _ in range(2):
            with pytest.raises(LookupError, match="seven is not wanted") as caught:
                next(batches)
            assert caught.value.args == ("seven is not wanted",)
            where, trace = caught.value.__notes__
            assert where == "in transform= of sample 7 (number 7 of shard-00000.tar, key '00000007')"
            assert "in fail_at_seven" in trace
        assert loader.state_dict()["consumed"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_a_killed_process_is_named_at_once_and_the_next_batch_begins_another(tars):
    with open_loader(tars, "threads") as loader:
        expected = [ids(batch) for batch in loader]
    with open_loader(tars, transform=row_functions.rest_a_moment) as loader:
        batches = iter(loader)
        found = [ids(next(batches)) for _ in range(3)]
        pid = loader.metrics().loader_process
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match=f"^loader process {pid} was killed by SIGKILL") as caught:
            found.extend(map(ids, batches))
        assert time.monotonic() - started < 5
        assert "place='threads'" in str(caught.value)
        found += map(ids, batches)
        assert found == expected
        assert loader.metrics().loader_process not in (0, pid)


@pytest.mark.full
def test_a_transform_that_ends_its_process_ends_no_training(tars):
    options = {"transform": row_functions.exit_at_seven, "shuffle": False, "batch_size": 64}
    with open_loader(tars, **options) as loader, pytest.raises(WorkerError, match="ended with exit code 3"):
        next(iter(loader))


@pytest.mark.full
def test_a_stopped_process_is_named_while_it_is_waited_for_and_then_an_error(tars, monkeypatch):
    monkeypatch.setattr(worker_process, "STOPPED_S", 2.0)
    with open_loader(tars, transform=row_functions.rest_a_moment, batch_size=4) as loader:
        batches = iter(loader)
        next(batches)
        pid, told = loader.metrics().loader_process, []
        os.kill(pid, signal.SIGSTOP)
        has_ended = threading.Event()

        def watch() -> None:
            while not has_ended.wait(0.05):
                told.append(loader.activity().get("waiting_for", ""))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(WorkerError, match=f"loader process {pid} has been stopped for 2 s"):
                list(batches)
        finally:
            has_ended.set()
            watcher.join()
        assert f"the loader's process {pid}, which is stopped and which `kill -CONT {pid}` continues" in told
        assert len(list(batches)) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_batches_that_are_kept_stay_as_they_were_while_later_ones_grow(tars):
    options = {"transform": row_functions.grow, "batch_size": 4, "shuffle": False, "memory_limit": "64MiB"}
    with open_loader(tars, **options) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        kept += [next(iter(loader)) for _ in range(12)]  # each is left after a batch, with others on their way
    with open_loader(tars, "threads", **options) as loader:
        expected = [batch for _ in range(3) for batch in loader]
        expected += [next(iter(loader)) for _ in range(12)]
    for one, other in zip(kept, expected, strict=True):
        assert_equal(one, other)
        one["number"].add_(1)


@pytest.mark.full
def test_a_child_that_is_forked_keeps_the_batch_it_got(tars):
    with open_loader(tars, transform=row_functions.grow, batch_size=32, shuffle=False) as loader:
        batches = iter(loader)
        batch = next(batches)
        expected = [values.clone() for values in batch["values"]]
        ours, theirs = os.pipe()
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(ours, 1)  # until the parent has gone on
            same = all(torch.equal(one, other) for one, other in zip(batch["values"], expected, strict=True))
            os.write(answer, b"1" if same else b"0")
            os._exit(0)
        del batch
        for _ in range(4):
            for _ in loader:
                pass
        os.write(theirs, b"x")
        assert os.read(answers, 1) == b"1"
        os.waitpid(child, 0)
    for descriptor in (ours, theirs, answers, answer):
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
def test_tensors_that_functions_make_have_the_dtype_that_the_program_has_set(tars):
    torch.set_default_dtype(torch.float64)
    try:
        with open_loader(tars, transform=row_functions.make_default_floats) as loader:
            assert next(iter(loader))["half"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.full
def test_objects_warnings_and_prints_come_through(tars, capfd):
    options = {"transform": row_functions.speak_at_seven, "collate": row_functions.Samples, "with_ids": False}
    with open_loader(tars, shuffle=False, **options) as loader, pytest.warns(UserWarning, match="seven needs care"):
        first = next(iter(loader))
    assert type(first) is row_functions.Samples
    assert [sample["txt"] for sample in first] == [str(number) for number in range(8)]
    assert isinstance(first[0]["bin"], bytes)
    assert "seven is here" in capfd.readouterr().out


@pytest.mark.full
def test_what_cannot_be_sent_back_is_an_error_that_says_what_to_do(tars):
    options = {"collate": make_local, "with_ids": False}
    with open_loader(tars, **options) as loader, pytest.raises(ConfigError, match="a batch cannot be sent") as caught:
        next(iter(loader))
    assert "use place='threads'" in str(caught.value)


def make_local(samples: list[Any]) -> Any:
    return lambda: samples


def test_a_bad_sample_of_a_batch_that_cannot_be_sent_is_told_before_the_error(tars, quickly):
    options = {"collate": make_local, "with_ids": False, "transform": row_functions.fail_at_seven, "shuffle": False}
    with open_loader(tars, on_error="replace", **options) as loader:
        told = pytest.warns(BadSampleWarning, match="seven is not wanted")
        with told, pytest.raises(ConfigError, match="a batch cannot be sent"):
            next(iter(loader))
        assert [bad.id for bad in loader.bad_samples] == [7]


@pytest.mark.full
def test_traces_show_the_threads_of_the_process(tars, tmp_path):
    with open_loader(tars) as loader:
        with loader.trace(tmp_path / "first.json"):
            list(loader)
        list(loader)
        with loader.trace(tmp_path / "second.json"):
            list(loader)
    for name in ("first", "second"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert "penstock-assemble" in {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"assemble", "consumer wait"} <= {event["name"] for event in events}


@pytest.mark.full
def test_closing_while_a_batch_is_waited_for_ends_the_wait(tars):
    with open_loader(tars, transform=row_functions.sleep_for_minutes) as loader:
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                next(iter(loader))
            except BaseException as exc:  # noqa: BLE001 - looked at below
                errors.append(exc)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not loader.metrics().loader_process:
            time.sleep(0.05)
        time.sleep(0.5)
        started = time.monotonic()
        loader.close()
        waiting.join(20)
        assert time.monotonic() - started < 10
    (error,) = errors
    assert isinstance(error, LoaderClosedError)


@pytest.mark.full
def test_interrupts_lose_and_repeat_no_batch(tars):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with open_loader(tars, "threads", batch_size=4) as loader:
        expected = [ids(batch) for batch in loader]
    found: list[list[int]] = []
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_loader(tars, batch_size=4, transform=row_functions.rest_a_moment) as loader:
            batches, left = iter(loader), 8
            while left:
                signal.setitimer(signal.ITIMER_REAL, 0.3 if left > 1 else 0)
                try:
                    for batch in batches:
                        found.append(ids(batch))  # noqa: PERF401 - what came before an interrupt is kept
                    break
                except KeyboardInterrupt:
                    left -= 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == expected[: len(found)]
    assert len(found) == len(expected)


@pytest.mark.slow
def test_a_killed_training_process_takes_the_loaders_with_it(tars, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from penstock import DistributedDataLoader\n"
        "def rest(sample):\n"
        "    time.sleep(0.02)\n"
        "    return {'number': int(sample['txt'])}\n"
        "if __name__ == '__main__':\n"
        "    loader = DistributedDataLoader(sys.argv[1], batch_size=8, place='process', transform=rest, processes=1)\n"
        "    for batch in loader:\n"
        "        print(loader.metrics().loader_process, flush=True)\n"
    )
    with started_process([sys.executable, script, tars], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        workers = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert workers
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        assert parent.stdout.readline()
        parent.kill()
        until = time.monotonic() + 30
        while any(Path(f"/proc/{one}").exists() for one in (pid, *workers)):
            assert time.monotonic() < until
            time.sleep(0.05)


# -- what no process is started for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"transform": lambda sample: sample}, "transform=<function <lambda>"),
        ({"keep": lambda sample: True}, "keep=<function <lambda>"),
        ({"raw": "view", "decode": None}, "raw='view'"),
    ],
)
def test_what_a_process_cannot_do_is_refused_by_name_where_it_is_asked_for(tars, options, named):
    with pytest.raises(ConfigError, match="place='process': ") as caught:
        open_loader(tars, **options)
    assert named in str(caught.value)
    assert "place='threads'" in str(caught.value)
    with open_loader(tars, "auto", **options) as loader:
        assert "threads of this process ('auto': " in loader.describe()


def test_a_store_in_memory_is_read_by_threads():
    store = MemoryStore("mem://beside/data")
    store.put("a.jsonl", b'{"n": 1}\n' * 20)
    with open_loader(store.url, "auto", transform=row_functions.keep) as loader:
        assert "lies in the memory of the training process" in loader.describe()
        assert len(list(loader)) == 2
    with pytest.raises(ConfigError, match="lies in the memory of the training process"):
        open_loader(store.url)
    store.drop()


@pytest.mark.parametrize("place", ["process", "auto"])
def test_where_no_process_can_be_started_threads_do_what_was_not_asked_of_it(tars, place, monkeypatch, caplog):
    def refuse(*_: Any, **__: Any) -> Any:
        raise WorkerError("a loader process cannot be started: no room; use place='threads'")

    monkeypatch.setattr(loader_process, "start_process", refuse)
    with open_loader(tars, place, transform=row_functions.keep) as loader:
        if place == "process":
            with pytest.raises(WorkerError, match="cannot be started: no room"):
                next(iter(loader))
        else:
            assert sum(1 for _ in loader) == sum(SIZES) // 8
            assert "because a process cannot: a loader process cannot be started: no room" in caplog.text
            assert "a process could not be started" in loader.describe()


@pytest.mark.parametrize(
    ("options", "cores", "chosen"),
    [
        ({}, 8, "threads of this process ('auto': no images are decoded, and no functions"),
        ({"transform": row_functions.keep}, 1, "threads of this process ('auto': a rank has 1 of the machine's cores"),
        ({"transform": row_functions.keep}, 2, "a process of its own, beside this one ('auto': images or functions"),
        ({"decode": {"bin": row_functions.reverse_bytes}}, 8, "a process of its own"),
    ],
)
def test_auto_chooses_a_process_where_it_pays(tars, monkeypatch, options, cores, chosen):
    monkeypatch.setattr("penstock.loader.config.tuning.usable_cores", lambda: cores)
    with open_loader(tars, "auto", **options) as loader:
        assert chosen in loader.describe()


def test_an_unknown_place_is_refused_with_those_that_there_are(tars):
    with pytest.raises(ConfigError, match=r"place='proces'.*'process'"):
        open_loader(tars, "proces")
