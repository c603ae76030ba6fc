"""Splits never mix silently: they are told by names, chosen by ``split=``, and refused where several would be read."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub
from fsspec.utils import glob_translate
from hypothesis import given
from hypothesis import strategies as st

from penstock import DistributedDataLoader, open_manifest, verify
from penstock.loader import ConfigError, DatasetError, StateMismatchError
from penstock.loader.dataset.listing import match_glob
from penstock.loader.dataset.source import select
from penstock.loader.dataset.splits import name_splits
from penstock.storage import MemoryStore, ObjectInfo

_names = itertools.count()
HUB = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet",
       "data/unsupervised-00000-of-00001.parquet", "README.md")  # fmt: skip


def parquet(first: int, rows: int = 10) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"n": np.arange(first, first + rows)}), sink)
    return sink.getvalue()


class Bucket(MemoryStore):
    """A bucket of parquet shards: the i-th put holds the numbers from 1000 * i on."""

    def fill(self, *keys: str) -> Bucket:
        for number, key in enumerate(keys):
            data = parquet(1000 * number) if key.endswith(".parquet") else b"{}"
            self.put(key, data)
        return self


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    store = Bucket(f"mem://splits-{next(_names)}")
    yield store
    store.drop()


def shards(source: Any, **options: Any) -> list[str]:
    manifest = open_manifest(source, **options)
    return [manifest.url + shard.key for shard in manifest.shards]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["train/a.tar", "train/deep/b.tar", "val/c.tar"], ["train", "train", "val"]),
        (["train.jsonl", "validation.jsonl.zst", "x.jsonl"], ["train", "validation", None]),
        (["imagenet-train-000.tar", "imagenet_val_001.tar", "TEST.tar"], ["train", "val", "test"]),
        (["data/train-00000-of-00001-6ef3.parquet", "data/extra-00000-of-00001.parquet"], ["train", "extra"]),
        (["data/train_sft-00000-of-00001.parquet", "data/test_gen-00000-of-00001.parquet"], ["train_sft", "test_gen"]),
        (["shard-00000-of-00002.tar", "shard-00001-of-00002.tar"], [None, None]),
        (["train2017/x.tar", "val2017/x.tar", "split=test/x.tar"], ["train", "val", "test"]),
        (["train/dev-blog.tar", "train/test.tar"], ["train", "train"]),  # a folder called so beats a word in a name
        (["test/train-00000-of-00001.parquet"], ["train"]),  # and the hub's own names beat a folder
        (["test-suite/train-0.tar", "my-train/0.tar", "train-test-mix.tar"], ["train", "train", None]),
        (["train2014/a.tar", "train2017/b.tar", "val2017/c.tar"], ["train2014", "train2017", "val"]),
        (["x/train.jsonl", "x/train_small.jsonl.gz", "x/test-0.jsonl"], ["train", "train_small", "test"]),
        (["train/0.tar", "train-small/0.tar", "y/train/0.tar"], ["train", "train_small", "train"]),
        (["train_small.tar", "train_large-0.tar", "train_large-1.tar"], ["train_small", "train_large", "train_large"]),
        # Numbers and words that count parts, languages and sources are of one split.
        (["train0.tar", "train1999.tar", "train2000.tar", "train2001.tar"], ["train"] * 4),
        (["train_2019.parquet", "train_2020.parquet", "train.parquet"], ["train"] * 3),
        (["train_wiki.jsonl", "train_books.jsonl", "en/train.jsonl", "de/train_0.jsonl"], ["train"] * 4),
        (["train.part-0.jsonl", "train-data-1.jsonl", "split=train/2.jsonl"], ["train"] * 3),
        (["train-clean-100/0.tar", "train-clean-360/0.tar", "train-other-500/0.tar"], ["train"] * 3),
        (
            ["training/data-00000-of-00002.arrow", "contest.tar", "evaluate.tar", "trains.tar"],
            ["training", *[None] * 3],
        ),
    ],
)
def test_names_of_folders_and_files_tell_the_split(keys: list[str], expected: list[str | None]) -> None:
    names = name_splits(keys)
    assert [names.get(key) for key in keys] == expected


def test_a_folder_of_several_splits_is_refused_with_its_splits_and_a_way_out(bucket: Bucket) -> None:
    bucket.fill(*HUB)
    with pytest.raises(DatasetError) as refused:
        DistributedDataLoader(bucket.url, batch_size=2)
    text = str(refused.value)
    assert "test (1 shard), train (2 shards), unsupervised (1 shard)" in text
    assert "split='train'" in text
    assert f"{bucket.url}/**" in text
    assert len(shards(f"{bucket.url}/**")) == len(shards(bucket.url, split="all")) == 4
    assert open_manifest(f"{bucket.url}/**").fingerprint == open_manifest(bucket.url, split="all").fingerprint
    for way in ([f"{bucket.url}/"], [f"{bucket.url}/data/"]):
        with pytest.raises(DatasetError, match="several splits"):
            open_manifest(way)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (("train2014/a.parquet", "train2017/b.parquet"), ("train2014", "train2017")),
        (("train.parquet", "train_small.parquet"), ("train", "train_small")),
    ],
)
def test_versions_and_parts_of_a_split_are_chosen_by_their_own_names(
    bucket: Bucket, keys: tuple[str, ...], names: tuple[str, ...]
) -> None:
    bucket.fill(*keys)
    with pytest.raises(DatasetError, match=rf"several splits: {names[0]} \(1 shard\), {names[1]} \(1 shard\)"):
        open_manifest(bucket.url)
    for name, key in zip(names, keys, strict=True):
        assert shards(bucket.url, split=name) == [f"{bucket.url}/{key}"]
    assert len(shards(bucket.url, split=list(names))) == len(shards(bucket.url, split="all")) == 2
    if "train" not in names:
        with pytest.raises(DatasetError, match="no split 'train'; its splits are train2014"):
            open_manifest(bucket.url, split="train")


def test_a_saved_manifest_of_all_does_not_let_splits_mix_and_serves_each(bucket: Bucket) -> None:
    bucket.fill(*HUB)
    everything = open_manifest(f"{bucket.url}/data", split="all")
    bucket.put("data/penstock-manifest.arrow", everything.to_bytes())
    with pytest.raises(DatasetError, match="several splits"):
        open_manifest(f"{bucket.url}/data")
    with pytest.raises(DatasetError, match="several splits"):
        verify(f"{bucket.url}/data")
    before = len(bucket.calls)
    train = open_manifest(f"{bucket.url}/data", split="train")
    assert train.num_samples == 20
    read = [call.key for call in bucket.calls[before:] if call.verb == "get"]
    assert read == ["data/penstock-manifest.arrow"]
    assert verify(f"{bucket.url}/data", split="train").samples == 20


def test_a_split_is_the_same_data_set_as_its_folder_its_glob_and_its_list(bucket: Bucket) -> None:
    bucket.fill(*HUB)
    named = [f"{bucket.url}/{key}" for key in HUB[:2]]
    old = open_manifest(named)
    ways: list[tuple[Any, Any]] = [
        (bucket.url, "train"),
        (f"{bucket.url}/data", "train"),
        (f"{bucket.url}/data/train-*.parquet", None),
        (f"{bucket.url}/data/*.parquet", "train"),
        (f"{bucket.url}/data/train-0000{{0..1}}-of-00002.parquet", None),
    ]
    for source, split in ways:
        found = open_manifest(source, split=split)
        assert (found.fingerprint, found.url) == (old.fingerprint, old.url), (source, split)

    bucket.fill("other/train/0.parquet", "other/train/1.parquet", "other/val/en/0.parquet")
    for name in ("train", "val"):
        folder = open_manifest(f"{bucket.url}/other/{name}")
        split = open_manifest(f"{bucket.url}/other", split=name)
        assert (split.fingerprint, split.url) == (folder.fingerprint, folder.url)


def test_a_split_goes_by_another_word_for_it_and_several_come_in_the_order_asked_for(bucket: Bucket) -> None:
    bucket.fill("train/0.parquet", "val/0.parquet", "val/README.md")
    assert shards(bucket.url, split="validation") == [f"{bucket.url}/val/0.parquet"]
    both = shards(bucket.url, split=["val", "train"])
    assert both == [f"{bucket.url}/val/0.parquet", f"{bucket.url}/train/0.parquet"]
    with pytest.raises(DatasetError, match=r"no split 'test'; its splits are train \(1 shard\), val \(1 shard\)"):
        open_manifest(bucket.url, split="test")
    with pytest.raises(DatasetError, match="tell no splits"):
        open_manifest(f"{bucket.url}/train", split="train")
    with pytest.raises(ConfigError, match="twice"):
        open_manifest(bucket.url, split=["val", "validation"])
    for wrong in ("", [], [""], 3):
        with pytest.raises(ConfigError, match=re.escape(f"split={wrong!r}: must be")):
            open_manifest(bucket.url, split=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of a manifest"):
        open_manifest(open_manifest(f"{bucket.url}/train"), split="train")
    bucket.fill("train/0.parquet", "val/0.parquet", "dev/0.parquet")
    with pytest.raises(DatasetError, match="no split 'validation'"):  # which of the two is not guessed
        open_manifest(bucket.url, split="validation")


def test_what_save_to_disk_writes_is_read_by_the_names_it_lists(tmp_path: Path) -> None:
    for number, split in enumerate(("fr", "en")):
        (tmp_path / split).mkdir()
        table = pa.table({"n": [number] * 3})
        with pa.ipc.new_stream(tmp_path / split / "data-00000-of-00001.arrow", table.schema) as writer:
            writer.write_table(table)
        (tmp_path / split / "state.json").write_text("{}")
    assert open_manifest(tmp_path).num_samples == 6  # nothing says that these folders are splits
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["fr", "en"]}))
    with pytest.raises(DatasetError, match=r"en \(1 shard\), fr \(1 shard\)"):
        open_manifest(tmp_path)
    (tmp_path / "en" / "cache-0123456789abcdef.arrow").write_bytes(b"a result of map, of other columns")
    with DistributedDataLoader(tmp_path, split="en", batch_size=3) as loader:
        assert next(iter(loader))["n"].tolist() == [1, 1, 1]


def test_loose_files_are_chosen_by_split_too(bucket: Bucket) -> None:
    bucket.fill("train/ants/0.jpg", "train/bees/0.jpg", "val/ants/0.jpg")
    store, selection = select(bucket.url, split="val")
    assert (store.url, [info.key for info in selection.listing]) == (f"{bucket.url}/val", ["ants/0.jpg"])


def test_a_state_of_one_split_is_refused_by_another(bucket: Bucket) -> None:
    bucket.fill("train.parquet", "test.parquet")
    with DistributedDataLoader(bucket.url, split="train", batch_size=2) as loader:
        state = loader.state_dict()
        numbers = {int(n) for batch in loader for n in batch["n"]}
    assert numbers == set(range(10))
    with DistributedDataLoader(bucket.url, split="test", batch_size=2) as loader, pytest.raises(StateMismatchError):
        loader.load_state_dict(state)


# -- globs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("x-*.tar", ["x-0.tar", "x-1.tar"]),
        ("x-?.tar", ["x-0.tar", "x-1.tar"]),
        ("x-[1-9].tar", ["x-1.tar"]),
        ("*", ["x-0.tar", "x-1.tar"]),
        ("**", ["a/b/x-2.tar", "a/x-1.tar", "x-0.tar", "x-1.tar"]),
        ("**/x-1.tar", ["a/x-1.tar", "x-1.tar"]),
        ("a/**/*.tar", ["a/b/x-2.tar", "a/x-1.tar"]),
        ("a*", ["a/b/x-2.tar", "a/x-1.tar"]),  # fits no object, but a folder
        ("*/", ["a/b/x-2.tar", "a/x-1.tar"]),
        ("y*", []),
    ],
)
def test_globs_fit_whole_keys_part_by_part(glob: str, expected: list[str]) -> None:
    objects = [ObjectInfo(key, 1) for key in ("a/b/x-2.tar", "a/x-1.tar", "x-0.tar", "x-1.tar")]
    assert [info.key for info in match_glob(glob, objects)] == expected


@given(glob=st.text("ab*?[]!./-^+(", max_size=12), keys=st.lists(st.text("ab/.-!^+([", max_size=10), min_size=1))
def test_globs_fit_what_their_plain_translation_fits(glob: str, keys: list[str]) -> None:
    try:
        fits = re.compile(glob_translate(glob)).match
    except (ValueError, re.error):
        return
    objects = [ObjectInfo(key, 1) for key in dict.fromkeys(keys) if fits(key)]
    if objects and not glob.endswith("/"):
        others = [ObjectInfo(key, 1) for key in dict.fromkeys(keys) if not fits(key)]
        assert match_glob(glob, [*others, *objects]) == objects


def test_many_stars_and_a_name_of_repeats_take_no_time() -> None:
    assert match_glob("*a" * 19 + "b", [ObjectInfo("a" * 200, 1)]) == []


def test_a_glob_lists_its_longest_fixed_prefix_and_refuses_what_fits_nothing(bucket: Bucket) -> None:
    bucket.fill("a/x-0.parquet", "a/x-1.parquet", "a/y.parquet", "b/x-0.parquet")
    before = len(bucket.calls)
    assert shards(f"{bucket.url}/a/x-*.parquet") == [f"{bucket.url}/a/x-{n}.parquet" for n in range(2)]
    assert [call.key for call in bucket.calls[before:] if call.verb == "list"] == ["a/x-"]
    assert len(shards([f"{bucket.url}/a/y.parquet", f"{bucket.url}/b/*.parquet"])) == 2
    assert len(shards(f"{bucket.url}/{{a,b}}/x-*.parquet")) == 3
    with pytest.raises(DatasetError, match=r"missing z-\*.parquet"):
        open_manifest(f"{bucket.url}/a/z-*.parquet")
    with pytest.raises(ConfigError, match="given twice"):
        open_manifest([f"{bucket.url}/a/x-*.parquet", f"{bucket.url}/a/*-0.parquet"])
    with pytest.raises(ConfigError, match=r"a\*\*b: not a glob"):
        open_manifest(f"{bucket.url}/a**b")


def test_objects_and_paths_with_brackets_in_their_names_are_still_read(bucket: Bucket, tmp_path: Path) -> None:
    bucket.fill("x[1].parquet", "x1.parquet")
    assert shards(f"{bucket.url}/x[1].parquet") == [f"{bucket.url}/x[1].parquet"]
    folder = tmp_path / "run[1]"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(parquet(0))
    assert open_manifest(folder).num_samples == open_manifest(folder / "a.parquet").num_samples == 10
    assert open_manifest(str(tmp_path / "**" / "*.parquet")).num_samples == 10


def test_a_data_set_of_the_hub_is_opened_by_split_and_glob(hub: FakeHub) -> None:
    for number, key in enumerate(HUB):
        hub.pipe_file(f"hf://datasets/org/name/{key}", parquet(1000 * number) if "parquet" in key else b"# name")
    with pytest.raises(DatasetError, match="several splits"):
        open_manifest("hf://datasets/org/name")
    with DistributedDataLoader("hf://datasets/org/name", split="train", batch_size=5) as loader:
        assert sum(len(batch["n"]) for batch in loader) == 20
        fingerprint = loader.manifest.fingerprint
    assert open_manifest("hf://datasets/org/name/data/train-*.parquet").fingerprint == fingerprint


@pytest.mark.s3
def test_globs_and_splits_on_a_real_server(s3_url: tuple[str, dict[str, Any]]) -> None:
    from penstock import open_store

    url, options = s3_url
    store = open_store(url, storage_options=options)
    for number, key in enumerate(HUB):
        store.put(key, parquet(1000 * number) if "parquet" in key else b"# name")
    store.close()
    with pytest.raises(DatasetError, match="several splits"):
        open_manifest(url, storage_options=options)
    glob = open_manifest(f"{url}/**/train-*.parquet", storage_options=options)
    split = open_manifest(url, split="train", storage_options=options)
    assert glob.num_samples == split.num_samples == 20
    assert open_manifest(f"{url}/data/train-?????-of-*", storage_options=options).fingerprint == split.fingerprint
