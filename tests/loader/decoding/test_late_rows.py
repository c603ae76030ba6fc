"""Rows that are copied when their batch is due are those that gathering at once gives."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import DistributedDataLoader
from penstock.loader import LoaderClosedError, TokensFormat
from penstock.loader.columns import ArrayColumn, Block, pack_records
from penstock.loader.decoding import rows as late_rows
from penstock.loader.decoding.batch_memory import BatchMemory
from penstock.loader.decoding.decode import FieldDecoders
from penstock.loader.decoding.gather import gather
from penstock.loader.decoding.rows import Rows, complete_all
from penstock.loader.order.spans import ChunkRows
from penstock.loader.pipeline.pipeline import Pipeline
from penstock.storage.threads.daemon_pool import DaemonPool

LAYOUTS = ["plain", "overlapping", "gaps", "reversed", "columns first", "other dtype"]


def wide_rows(layout: str, rows: int, seed: int) -> np.ndarray:
    """(rows, 600) of uint16, laid out in one of the ways that formats open arrays in."""
    flat = np.random.default_rng(seed).integers(0, 1 << 16, rows * 601 + 600, dtype=np.uint16)
    strides = {"overlapping": (2 * 599, 2), "gaps": (2 * 601, 2), "columns first": (2, 2 * rows)}
    if layout in strides:
        return np.lib.stride_tricks.as_strided(flat, (rows, 600), strides[layout], writeable=False)
    whole = flat[: rows * 600].reshape(rows, 600)
    return whole[::-1] if layout == "reversed" else whole.astype(np.uint32) if layout == "other dtype" else whole


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 40)), min_size=1, max_size=5),
    st.sampled_from(["auto", None]),
    st.sampled_from([late_rows._MOST_BYTES, 0]),  # 0: chunks lie too far apart
    st.data(),
)
def test_late_rows_are_those_of_the_chunks(chunks, decode, most_bytes, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_rows, "_MOST_BYTES", most_bytes)
        check_rows(chunks, decode, data)


def check_rows(chunks, decode, data):
    blocks = []
    for number, (layout, rows) in enumerate(chunks):
        layout = layout if number else "plain"
        scalars = np.random.default_rng(number).integers(0, 1 << 16, (5, rows), dtype=np.uint16)
        columns = {f"c{i}": ArrayColumn(values) for i, values in enumerate(scalars)}
        columns["tokens"] = ArrayColumn(wide_rows(layout, rows, number))
        blocks.append(Block(rows, 0, columns))
    places = [(chunk, row) for chunk, (_, rows) in enumerate(chunks) for row in range(rows)]
    order = data.draw(st.permutations(places))
    groups = []
    for chunk in [0, *data.draw(st.permutations(range(1, len(chunks))))]:  # the first to arrive tells the dtype
        targets = np.array([i for i, place in enumerate(order) if place[0] == chunk], np.int64)
        rows = np.array([place[1] for place in order if place[0] == chunk], np.int64)
        groups.append((ChunkRows(chunk, rows, targets), pack_records(blocks[chunk])))
    low, high = sorted(data.draw(st.tuples(st.integers(0, len(order)), st.integers(0, len(order)))))
    first_ids = np.zeros(len(chunks), np.int64)
    rows = gather(groups, len(order), first_ids, FieldDecoders(decode), memory=BatchMemory(1 << 20))
    picked = [len(order) - 1, 0, 0]
    for part, expected in ((rows.cut(low, high), order[low:high]), (rows.pick(picked), [order[i] for i in picked])):
        fields = part.complete().fields
        for name in ["tokens", *(f"c{i}" for i in range(5))]:
            naive = [blocks[chunk].columns[name].values[row] for chunk, row in expected]
            assert fields[name].dtype == (np.uint16 if decode is None else np.int64)
            assert fields[name].flags.c_contiguous
            assert fields[name].flags.writeable
            assert fields[name].tolist() == np.array(naive).reshape(fields[name].shape).tolist()
    assert rows.count_bytes({}) == len(order) * 605 * (2 if decode is None else 8)


def gather_wide(seed: int, rows: int, width: int, names: tuple[str, ...] = ("a", "b")) -> Rows:
    """Rows of one chunk in any order, with a field for each name."""
    rng = np.random.default_rng(seed)
    columns = {n: ArrayColumn(rng.integers(0, 1 << 16, (rows, width), dtype=np.uint16)) for n in names}
    group = ChunkRows(0, np.arange(rows), rng.permutation(rows))
    memory = BatchMemory(1 << 20)
    return gather([(group, Block(rows, 0, columns))], rows, np.zeros(1, np.int64), FieldDecoders("auto"), memory=memory)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 60)), max_size=12), st.data())
def test_batches_whose_rows_are_copied_together_are_those_copied_alone(cuts, data):
    spans = [gather_wide(0, 60, 600), gather_wide(1, 60, 600), gather_wide(2, 60, 700, ("a",))]
    parts = [spans[number].cut(start, stop) for number, start, stop in cuts]
    parts += [spans[0].pick([59, 0, 0]), spans[0].cut(0, 0)] * data.draw(st.integers(0, 1))
    memory = BatchMemory(data.draw(st.sampled_from([0, 1 << 20])))
    together = complete_all(parts, memory)
    for part, found in zip(parts, together, strict=True):
        alone = part.complete()
        assert found.ids is part.ids
        assert list(found.fields) == list(alone.fields)
        for name, values in alone.fields.items():
            assert found.fields[name].dtype == values.dtype
            assert found.fields[name].flags.c_contiguous
            assert np.array_equal(found.fields[name], values)
            found.fields[name][...] = -1  # what is done to one batch concerns no other


@pytest.mark.parametrize(("rows", "kept"), [(64, 4), (200, 1)])  # of 2,048 int64: batches of 1 and of 3 MiB
def test_who_keeps_a_batch_keeps_the_memory_of_few_others(rows, kept):
    memory = BatchMemory(64 << 20)
    span = gather_wide(0, 10 * rows, 2048, ("a",))
    batches = complete_all([span.cut(start, start + rows) for start in range(0, 10 * rows, rows)], memory)
    each = batches[0].fields["a"].nbytes
    one = batches[5].fields["a"]
    del batches
    assert memory.free_bytes == (10 - kept) * each
    del one
    assert memory.free_bytes == 10 * each


@pytest.mark.parametrize("name", ["tokens", "c3"])
def test_late_rows_keep_all_their_chunks_until_they_are_copied(name):
    def open_block(number: int) -> Block:
        columns = {f"c{i}": ArrayColumn(np.full(40, number, np.uint16)) for i in range(5)}
        return pack_records(Block(40, 0, {**columns, "tokens": ArrayColumn(np.full((40, 600), number, np.uint16))}))

    blocks = [open_block(number) for number in range(4)]
    kept = [weakref.ref(_of_block(block, name)) for block in blocks]
    groups = [(ChunkRows(i, np.array([i]), np.array([i])), block) for i, block in enumerate(blocks)]
    rows = gather(groups, 4, np.zeros(4, np.int64), FieldDecoders(None), memory=BatchMemory(1 << 20)).cut(0, 3)
    del blocks, groups
    assert all(of_chunk() is not None for of_chunk in kept)
    copied = rows.complete().fields[name]
    assert copied.reshape(3, -1)[:, 0].tolist() == [0, 1, 2]
    del rows
    assert not any(of_chunk() is not None for of_chunk in kept)


def _of_block(block: Block, name: str) -> np.ndarray:
    return block.columns[name].values if name in block.columns else block.records[0].rows


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """256 sequences of 512 tokens, each of its own number."""
    folder = tmp_path_factory.mktemp("tokens")
    np.repeat(np.arange(256, dtype=np.uint16), 512).tofile(folder / "tokens.bin")
    return str(folder)


def open_tokens(folder: str, **options: object) -> DistributedDataLoader:
    settings = {"batch_size": 16, "with_ids": True, "seed": 3, "rank": 0, "world_size": 1, **options}
    return DistributedDataLoader(folder, format=TokensFormat(seq_len=512, chunk_bytes=1 << 14), **settings)


@pytest.mark.parametrize("threads", [1, 3])
def test_transforms_and_collate_get_rows_that_were_copied_late(tokens, threads):
    def shift(sample: dict[str, object]) -> dict[str, object]:
        return {"shifted": sample["tokens"] + 1}

    def stack(samples: list[dict[str, object]]) -> tuple[list[int], torch.Tensor]:
        return [s["__id__"] for s in samples], torch.stack([torch.as_tensor(s["shifted"]) for s in samples])

    with open_tokens(tokens, transform=shift, collate=stack, threads=threads) as loader:
        batches = [(ids, rows) for _ in range(2) for ids, rows in loader]
    assert len(batches) == 32
    assert all(torch.equal(rows, torch.tensor(ids)[:, None].expand(-1, 512) + 1) for ids, rows in batches)


def test_rows_may_be_copied_before_whoever_asked_for_it_goes_on(tokens, monkeypatch):
    expected = [batch["tokens"] for batch in open_tokens(tokens)]
    submit = DaemonPool.submit

    def submit_and_wait(pool, function, *args):
        future = submit(pool, function, *args)
        if getattr(function, "__name__", "") == "start_together":
            future.result(60)
        return future

    monkeypatch.setattr(DaemonPool, "submit", submit_and_wait)
    found = [batch["tokens"] for batch in open_tokens(tokens)]
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_one_job_copies_the_rows_of_several_batches_which_stay_apart(tokens, monkeypatch):
    submit, together = DaemonPool.submit, list[int]()

    def count(pool, function, *args):
        if getattr(function, "__name__", "") == "start_together":
            together.append(len(args[1]))
        return submit(pool, function, *args)

    monkeypatch.setattr(DaemonPool, "submit", count)
    kept = []
    with open_tokens(tokens) as loader:
        for _ in range(2):
            for batch in loader:
                kept.append((batch["tokens"], batch["__id__"]))
                assert torch.equal(batch["tokens"], batch["__id__"][:, None].expand(-1, 512))
                batch["tokens"].neg_()  # as a user may do with a batch of their own
    assert sorted(i for _, ids in kept for i in ids.tolist()) == sorted(2 * list(range(256)))
    assert all(torch.equal(rows, -ids[:, None].expand(-1, 512)) for rows, ids in kept)
    assert together[0] == 1  # the first batch waits for no other
    assert max(together) == late_rows.MOST_TOGETHER


def test_a_batch_whose_rows_are_being_copied_ends_with_the_loader(tokens, monkeypatch):
    reached, stopped, go_on = threading.Event(), threading.Event(), threading.Event()
    submit, stop = DaemonPool.submit, Pipeline.stop

    def waiting(pool: DaemonPool, function: object, *args: object) -> object:
        def run() -> object:
            reached.set()
            go_on.wait(60)
            return function(*args)

        return (
            submit(pool, run)
            if getattr(function, "__name__", "") == "start_together"
            else submit(pool, function, *args)
        )

    def stopping(pipeline: Pipeline) -> None:
        stop(pipeline)
        stopped.set()

    monkeypatch.setattr(DaemonPool, "submit", waiting)
    monkeypatch.setattr(Pipeline, "stop", stopping)
    errors: list[LoaderClosedError] = []

    def read(loader: DistributedDataLoader) -> None:
        try:
            for _ in loader:
                pass
        except LoaderClosedError as exc:
            errors.append(exc)

    loader = open_tokens(tokens, threads=1)
    reader = threading.Thread(target=read, args=(loader,))
    reader.start()
    assert reached.wait(60)
    closer = threading.Thread(target=loader.close)
    closer.start()
    assert stopped.wait(60)
    go_on.set()
    closer.join(60)
    reader.join(60)
    assert not closer.is_alive()
    assert not reader.is_alive()
    assert len(errors) == 1


def test_a_loader_that_another_thread_closes_while_a_pass_starts_says_so(tokens, monkeypatch):
    start = Pipeline.start
    loader = open_tokens(tokens)

    def start_and_close(pipeline: Pipeline) -> None:
        start(pipeline)
        closer = threading.Thread(target=loader.close)
        closer.start()
        closer.join(60)

    monkeypatch.setattr(Pipeline, "start", start_and_close)
    with pytest.raises(LoaderClosedError):
        next(iter(loader))


def test_epochs_after_the_first_find_every_chunk_in_memory(tokens):
    with open_tokens(tokens) as loader:
        seen = [int(i) for _ in range(5) for batch in loader for i in batch["__id__"]]
        assert loader.metrics().fetched_chunks == loader.manifest.num_chunks
    assert sorted(seen) == sorted(5 * list(range(256)))


def test_one_of_several_ranks_keeps_the_chunks_that_later_epochs_ask_for(tokens):
    with open_tokens(tokens, rank=0, world_size=2) as loader:
        for _ in range(10):
            assert sum(len(batch["__id__"]) for batch in loader) == 128
        assert loader.metrics().fetched_chunks == loader.manifest.num_chunks
