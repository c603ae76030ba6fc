from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from odd_objects import put_odd

from penstock import DistributedDataLoader, open_manifest, open_store, pack, verify
from penstock.cli import run
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.storage import NotFoundError

pytestmark = pytest.mark.s3


def test_a_thousand_shards_are_indexed_in_seconds(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    pack([{"txt": "word " * 20, "cls": n} for n in range(20)], "mem://thousand", progress=False)
    source = open_store("mem://thousand")
    shard = source.get("shard-000000.tar")
    store = open_store(f"{url}/train", storage_options=options)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.put(f"part-{number:04d}.tar", shard), range(1000)))
    store.close()
    manifest = open_manifest(f"{url}/train", storage_options=options)
    assert (len(manifest.shards), manifest.num_samples) == (1000, 20_000)
    some = open_manifest(f"{url}/train/part-{{0100..0199}}.tar", storage_options=options)
    assert [shard.key for shard in some.shards] == [f"part-{number:04d}.tar" for number in range(100, 200)]


def test_a_data_set_is_packed_indexed_and_verified_on_a_real_server(s3_url: tuple[str, dict[str, Any]]) -> None:
    url, options = s3_url
    summary = pack(
        ({"txt": f"sample {n}"} for n in range(100)), f"{url}/out", shard_bytes=20_000, storage_options=options
    )
    result = verify(f"{url}/out", storage_options=options)
    assert (result.ok, result.samples, result.checksums) == (True, 100, True)
    saved = open_manifest(f"{url}/out/{MANIFEST_NAME}", storage_options=options)
    assert saved.fingerprint == summary.fingerprint == open_manifest(f"{url}/out", storage_options=options).fingerprint


def test_a_missing_bucket_is_told_at_once(s3_endpoint: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError, match="no-such-bucket-here"):
        open_manifest("s3://no-such-bucket-here/x/", storage_options=s3_endpoint)


def test_every_use_of_a_bucket_goes_on_beside_keys_that_no_store_reads(s3_url: tuple[str, dict[str, Any]]) -> None:
    """Prefixes, globs, splits and single objects in loaders, and the commands that list."""
    url, options = s3_url
    bucket = url.removeprefix("s3://")
    for split in ("train", "val"):
        pack([{"txt": f"{split} {n}"} for n in range(4)], f"{url}/{split}/", shard_bytes=3000, storage_options=options)
        put_odd(options, bucket, f"{split}/", "notes.md")
        put_odd(options, bucket, f"{split}/sub/", "lost.tar")
    with_train = [f"{url}/train/", f"{url}/train/*.tar", f"{url}/tr*/*.tar", f"{url}/train"]
    shards = open_manifest(f"{url}/train/", storage_options=options).shards
    assert len(shards) > 1
    cases: list[tuple[Any, dict[str, Any]]] = [(source, {}) for source in with_train]
    cases += [(url, {"split": "train"}), ([f"{url}/train/{shard.key}" for shard in shards], {})]
    for source, more in cases:
        with DistributedDataLoader(
            source, batch_size=4, shuffle=False, storage_options=options, last_batch="partial", **more
        ) as loader:
            assert [text for batch in loader for text in batch["txt"]] == [f"train {n}" for n in range(4)]
    told = [f"--storage-option={name}={value}" for name, value in options.items()]
    for command in ("index", "inspect", "verify"):
        assert run([command, f"{url}/val/", *told]) == 0
    put_odd(options, bucket, "new/", "notes.md")
    assert pack([{"txt": "one"}], f"{url}/new/", storage_options=options).samples == 1
