"""Mixtures of sources that filter, pack or give all they have, against a naive reference in one process."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_ranks import run_leg
from mixed_rows import write_rows
from naive_packing import sequences
from stream_reference import EndlessSource, Output, Yields, batches

from penstock import Manifest, Mixture, Packing, Source, audit, open_manifest
from penstock.loader import Keep, MixtureChangedWarning
from penstock.loader.order.permutation import mix64
from penstock.loader.order.plan import Order

SIZES = [61, 150, 40]
SEQ_LEN = 24


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Rows of which the column n is the sample id."""
    folder = tmp_path_factory.mktemp("rows")
    return [write_rows(folder / name, [size // 2, size - size // 2]) for name, size in zip("abc", SIZES, strict=True)]


def make_documents() -> list[list[list[int]]]:
    rng, tokens = np.random.default_rng(3), itertools.count(10)
    return [[[next(tokens) for _ in range(rng.integers(0, 20))] for _ in range(size)] for size in SIZES]


DOCUMENTS = make_documents()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Documents of tokens that are all different."""
    folder = tmp_path_factory.mktemp("texts")
    for name, documents in zip("abc", DOCUMENTS, strict=True):
        (folder / name).mkdir()
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32())), "n": np.arange(len(documents))})
        pq.write_table(table, folder / name / "0.parquet", row_group_size=7)
    return [open_manifest(folder / name) for name in "abc"]


def stays(way: str, number: int, sample_id: int) -> bool:
    """Whether a source, which drops in this way, keeps a sample."""
    if way == "stretch":  # so that lanes differ much
        return sample_id < SIZES[number] // 2
    return way == "plain" or bool(mix64(np.array([sample_id + 1000 * number], np.uint64))[0] % np.uint64(3))


def make_source(manifest: Manifest, number: int, way: str, weight: float) -> Source:
    if way in ("columns", "stretch"):
        keep = Keep(["n"], lambda columns: np.array([stays(way, number, int(n)) for n in columns["n"]], np.bool_))
        return Source(manifest, weight=weight, keep=keep)
    if way == "transform":
        return Source(
            manifest,
            weight=weight,
            transform=lambda sample: sample if stays(way, number, int(sample["n"])) else None,
            may_drop=True,
        )
    return Source(manifest, weight=weight)


def yields_of(way: str, number: int) -> Yields:
    return lambda lane: [i for i in lane if stays(way, number, i)]


def packs_of(way: str, number: int, unit: int) -> Yields:
    def pack(lane: list[int]) -> list[Output]:
        found: list[Output] = []
        for at in range(0, len(lane), unit):
            documents = [DOCUMENTS[number][i] for i in lane[at : at + unit] if stays(way, number, i)]
            found += sequences(documents, seq_len=SEQ_LEN, method="best_fit", long_documents="split", eos=None)
        return found

    return pack


@pytest.mark.slow
@settings(max_examples=20)
@given(
    ways=st.lists(st.sampled_from(["plain", "columns", "stretch", "transform"]), min_size=1, max_size=3),
    is_packed=st.booleans(),
    legs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 30), st.booleans()), min_size=1, max_size=3
    ),
    weights=st.lists(st.sampled_from([0.05, 0.3, 1.0, 2.0]), min_size=3, max_size=3),
    lanes=st.sampled_from([1, 2, 8, 32]),
    stop=st.sampled_from(["first_exhausted", "all_exhausted", "never"]),
    unit=st.integers(1, 20),
)
def test_global_batches_are_those_of_the_reference_on_any_ranks_and_across_resumes(
    manifests: list[Manifest],
    texts: list[Manifest],
    ways: list[str],
    is_packed: bool,
    legs: list[tuple[int, int, int, bool]],
    weights: list[float],
    lanes: int,
    stop: Any,
    unit: int,
) -> None:
    weights = weights[: len(ways)]
    more = {"packing": Packing(seq_len=SEQ_LEN, buffer_size=unit)} if is_packed else {}
    delivered: list[Any] = []
    sizes: list[tuple[list[float], int]] = []
    state: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", MixtureChangedWarning)
        for world_size, batch_size, steps, is_reversed in legs:
            now = weights[::-1] if is_reversed else weights
            of = texts if is_packed else manifests
            sources = {n: make_source(of[k], k, ways[k], now[k]) for k, n in zip(range(len(ways)), "abc", strict=False)}
            found, state = run_leg(
                Mixture(sources, stop=stop),
                world_size,
                steps,
                state,
                batch_size=batch_size,
                audit_dir=folder,
                lanes=lanes,
                window=2,
                piece=0,
                **more,
            )
            delivered += found
            sizes += [(now, world_size * batch_size)] * steps
        report = audit(folder)
    assert state is not None
    endless = [
        EndlessSource(
            (texts if is_packed else manifests)[k].samples,
            Order(lanes=lanes, **{name: state["sources"][k][name] for name in ("seed", "window", "piece")}),
            packs_of(way, k, unit) if is_packed else yields_of(way, k),
        )
        for k, way in enumerate(ways)
    ]
    expected: Iterator[Any] = batches(endless, iter(sizes), stop)
    assert delivered == list(expected)
    assert [source["taken"] for source in state["sources"]] == [
        sum(k == number for _, batch in delivered for k, _ in batch) for number in range(len(ways))
    ]
    assert report.is_exact, report
