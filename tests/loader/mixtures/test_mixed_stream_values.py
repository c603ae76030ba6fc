"""What samples and sequences of sources that filter or pack consist of."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mixed_ranks import run_leg
from mixed_rows import write_rows
from stream_mixtures import ODD, OPTIONS, SIZES
from streams_ranks import ThreadRanks

from penstock import DistributedDataLoader, Manifest, Mixture, Packing, Source, audit, open_manifest
from penstock.loader import (
    BadChunkWarning,
    ConfigError,
    StateMismatchError,
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    folder = tmp_path_factory.mktemp("rows")
    return {name: write_rows(folder / name, [size // 2, size - size // 2]) for name, size in SIZES.items()}


@pytest.mark.slow
def test_random_numbers_and_values_are_the_same_on_any_ranks(rows: dict[str, Manifest]) -> None:
    def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any] | None:
        noise = rng.random()
        return {"n": sample["n"], "noise": noise} if noise < 0.6 else None

    def sure(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"n": sample["n"], "noise": rng.random()}

    mixture = Mixture(
        {
            "a": Source(rows["a"], transform=noisy, may_drop=True),
            "b": Source(rows["b"], transform=sure),
            "c": Source(rows["c"], transform=sure, keep=ODD),
        },
        stop="never",
    )

    def read(loader: DistributedDataLoader) -> Any:
        return [
            list(zip(batch["n"].tolist(), batch["noise"].tolist(), strict=True))
            for batch in itertools.islice(loader, 20)
        ]

    def join(results: Any) -> Any:
        return [sorted(itertools.chain(*parts)) for parts in zip(*results, strict=True)]

    alone = join(ThreadRanks(1, mixture, batch_size=12, **OPTIONS).run(read))
    assert join(ThreadRanks(3, mixture, batch_size=4, **OPTIONS).run(read)) == alone


def test_a_bad_chunk_of_a_source_is_replaced_by_another_of_it(rows: dict[str, Manifest], tmp_path: Path) -> None:
    broken = write_rows(tmp_path / "broken", [40, 40])
    data = bytearray((tmp_path / "broken" / "000.parquet").read_bytes())
    start = int(broken.offsets[1])
    data[start : start + 30] = b"\xff" * 30
    (tmp_path / "broken" / "000.parquet").write_bytes(bytes(data))
    broken = open_manifest(tmp_path / "broken")
    mixture = Mixture({"b": Source(rows["b"]), "broken": Source(broken, keep=ODD)}, stop="never")
    with DistributedDataLoader(mixture, batch_size=10, max_bad_chunks=1, with_ids=True, **OPTIONS) as loader:
        with pytest.warns(BadChunkWarning):
            batches = list(itertools.islice(loader, 20))
        assert [chunk.shard.split("/")[-1] for chunk in loader.bad_chunks] == ["000.parquet"]
        for batch in batches:
            assert batch["n"].tolist() == batch["__id__"].tolist()
            assert all(n % 2 for n, k in zip(batch["n"].tolist(), batch["__source__"].tolist(), strict=True) if k)


def write_texts(folder: Path, lengths: list[int]) -> Manifest:
    folder.mkdir()
    documents = [[number + 2] * length for number, length in enumerate(lengths)]
    pq.write_table(
        pa.table({"tokens": pa.array(documents, pa.list_(pa.int32()))}), folder / "0.parquet", row_group_size=9
    )
    return open_manifest(folder)


def test_sequences_of_two_sources_their_ids_and_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    short, long = (write_texts(tmp_path / n, rng.integers(1, most, 90).tolist()) for n, most in (("s", 9), ("l", 40)))
    mixture = Mixture({"short": Source(short, weight=1), "long": Source(long, weight=3)}, stop="all_exhausted")
    packing = Packing(seq_len=32, buffer_size=20)
    with DistributedDataLoader(
        mixture, batch_size=8, packing=packing, with_ids=True, audit_dir=tmp_path / "audit"
    ) as loader:
        for batch in itertools.chain(loader, loader):
            assert batch["tokens"].shape == (8, 32)
            assert Counter(batch["__source__"].tolist()) == {0: 2, 1: 6}
            for tokens, documents, ids in zip(
                batch["tokens"].tolist(), batch["document_ids"].tolist(), batch["__id__"].tolist(), strict=True
            ):
                assert all(
                    token == ids[document] + 2
                    for token, document in zip(tokens, documents, strict=True)
                    if document >= 0
                )
            assert int(batch["cu_seqlens"][-1]) == 8 * 32
        metrics = loader.metrics()
    sources = metrics.sources
    assert sum(source.packed_tokens for source in sources.values()) == metrics.packed_tokens
    assert sum(source.padding_tokens for source in sources.values()) == metrics.padding_tokens
    assert 0.5 < sources["long"].packing_efficiency < 1
    assert sources["long"].samples == 3 * sources["short"].samples
    report = audit(tmp_path / "audit")
    assert report.is_exact
    assert report.mixture is not None
    assert [source.missing for source in report.mixture.sources] == [0, 0]


@pytest.mark.slow
def test_sources_have_packings_of_their_own_but_sequences_of_one_length(tmp_path: Path) -> None:
    texts = {name: write_texts(tmp_path / name, [5, 9, 30] * 20) for name in "ab"}
    packings = {"a": Packing(seq_len=32, buffer_size=7), "b": Packing(seq_len=32, method="concat", buffer_size=11)}
    own = Mixture({name: Source(text, packing=packings[name]) for name, text in texts.items()}, stop="never")
    whole, state = run_leg(own, 1, 12, None, batch_size=6)
    first, middle = run_leg(own, 2, 5, None, batch_size=3)
    rest, end = run_leg(own, 3, 7, middle, batch_size=2)
    assert first + rest == whole
    assert end == state
    other = {**packings, "b": Packing(seq_len=32, method="concat", buffer_size=12)}
    changed = Mixture({name: Source(text, packing=other[name]) for name, text in texts.items()}, stop="never")
    with DistributedDataLoader(changed, batch_size=6) as loader, pytest.raises(StateMismatchError, match="'b' packs"):
        loader.load_state_dict(state)
    for odd in (Packing(seq_len=16), Packing(seq_len=32, fields=["tokens"]), None):
        uneven = Mixture({"a": Source(texts["a"], packing=packings["a"]), "b": Source(texts["b"], packing=odd)})
        with pytest.raises(ConfigError, match=r"'b' (makes 16|does not pack|\['tokens'\])"):
            DistributedDataLoader(uneven, batch_size=4)
    ready = Mixture(
        {
            "a": Source(texts["a"], packing=packings["a"]),
            "b": Source(texts["b"], packing=Packing(seq_len=32, buffer_size=1)),
        }
    )
    with DistributedDataLoader(ready, batch_size=4, with_ids=True) as loader:
        for batch in itertools.islice(loader, 5):
            assert (batch["document_ids"][batch["__source__"] == 1] <= 0).all()  # one document a sequence


@pytest.mark.slow
def test_a_batch_has_its_order_wherever_the_run_began(rows: dict[str, Manifest]) -> None:
    """Ranks cut a global batch into shares by this order: where theirs differ, samples repeat and others are lost."""
    weights = {"a": 1, "b": 7, "c": 7}  # the first batch has none of the first source
    sources = {name: Source(rows[name], weight=weight, keep=ODD) for name, weight in weights.items()}
    mixture = Mixture(sources, stop="never")
    states, batches = [], []
    with DistributedDataLoader(mixture, batch_size=4, with_ids=True, lanes=4) as loader:
        running = iter(loader)
        for _ in range(20):
            states.append(loader.state_dict())
            batches.append(next(running)["__id__"].tolist())
    for state, batch in zip(states, batches, strict=True):
        with DistributedDataLoader(mixture, batch_size=4, with_ids=True, lanes=4) as loader:
            loader.load_state_dict(state)
            assert next(iter(loader))["__id__"].tolist() == batch
