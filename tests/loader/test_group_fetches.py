"""What four processes of a mesh read: counted by a proxy before a real S3 server, and put together again."""

from __future__ import annotations

from collections import Counter

import group_fetch_worker
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from launch_ranks import run_ranks

from devtools.faults.proxy import FaultProxy
from penstock import DistributedDataLoader, open_store

LENGTH = 64
FORMAT = {"seq_len": LENGTH, "chunk_bytes": 2048}  # chunks of 16 sequences
SHARDS, CHUNKS = 4, 400


def test_processes_of_a_node_fetch_each_chunk_once_with_a_cache_and_each_for_itself_without(s3_url, tmp_path):
    bucket, options = s3_url
    tokens = np.arange(CHUNKS // SHARDS * 16 * LENGTH).astype(np.uint16).tobytes()
    for folder in ("plain", "cached"):
        store = open_store(f"{bucket}/{folder}/", storage_options=options)
        for shard in range(SHARDS):
            store.put(f"{shard}.bin", tokens)
        store.close()
    with FaultProxy(options["endpoint"]) as proxy:
        told = {"bucket": bucket, "options": options | {"endpoint": proxy.url}, "format": FORMAT}
        told["cache"] = str(tmp_path / "cache")
        reports = run_ranks(group_fetch_worker.read_bucket, 4, told, timeout_s=200.0)
        seen = [one for one in proxy.requests if one.method == "GET" and ".bin" in one.path]
    for phase in ("plain", "cached"):
        first, peer, second, other = (report[phase] for report in reports)
        assert first == peer
        assert second == other
        assert sorted(x for batches in (first, second) for batch in batches for x in batch) == list(range(16 * CHUNKS))
    fetched = {
        folder: Counter((one.path.split("?")[0], one.headers["range"]) for one in seen if f"/{folder}/" in one.path)
        for folder in ("plain", "cached")
    }
    print({folder: (len(ranges), ranges.total(), max(ranges.values())) for folder, ranges in fetched.items()})
    assert {len(ranges) for ranges in fetched.values()} == {CHUNKS}
    assert fetched["plain"].total() >= 2 * CHUNKS  # each of the two groups reads half, by two processes
    # Once; but a process that waits long for an answer sends a second request: at most 4, and a twentieth of all.
    assert fetched["cached"].total() <= CHUNKS + 4 * 4 + CHUNKS // 20


def test_stages_and_parts_of_sequences_together_are_the_rows(tmp_path):
    tokens = np.arange(48 * 16).reshape(48, 16)
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 16)
        for name, values in (("tokens", tokens), ("labels", tokens + 1))
    }
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "rows" / "a.parquet", row_group_size=8)
    reports = run_ranks(group_fetch_worker.read_rows, 4, str(tmp_path / "rows"))
    with DistributedDataLoader(tmp_path / "rows", batch_size=8, rank=0, world_size=1, with_ids=True) as plain:
        whole = list(plain)
    assert {len(report) for report in reports} == {len(whole)}
    for step, batch in enumerate(whole):
        for process, name in enumerate(("tokens", "tokens", "labels", "labels")):
            got = reports[process][step]
            assert set(got) == {name, "__id__", "__positions__"}
            assert got["__id__"] == batch["__id__"].tolist()
            places = torch.tensor(got["__positions__"])
            assert torch.equal(torch.tensor(got[name]), batch[name].gather(1, places))
            assert places[0].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]][process % 2]
