"""States that earlier versions wrote, and the batches that came after them: kept as recordings, and compared.

The recordings hold, for each kind of loader, states at some positions (as JSON, with their checksums), and digests of
the sample ids of the batches behind them. A change of one breaks checkpoints of users. A new kind of loader is added
with ``PENSTOCK_UPDATE_GOLDEN=1 pytest tests/loader/test_recorded.py``, which never changes what is there already.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import DistributedDataLoader, Mixture, Packing, Source, Subset, TokensFormat, open_manifest
from penstock.loader import CostExpression, index_costs, write_costs

RECORDED = Path(__file__).parent / "recorded.json"
POSITIONS = (3, 30)  # batches handed out before a state was taken
BATCHES = 60  # behind each state, over the ends of epochs
LATER_WORLD = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets whose bytes, and so fingerprints, do not depend on versions of any library."""
    folder = tmp_path_factory.mktemp("recorded")
    rng = np.random.default_rng(0)
    for name in ("rows", "web", "code"):
        (folder / name).mkdir()
        for shard in range(4):
            lines = [_row(name, shard, row, int(rng.integers(1, 40))) for row in range(200)]
            (folder / name / f"{shard}.jsonl").write_text("".join(lines))
    (folder / "tokens").mkdir()
    rng.integers(0, 1000, 40_000, np.uint16).tofile(folder / "tokens" / "0.bin")
    (folder / "tar").mkdir()
    for shard in range(3):
        with tarfile.open(folder / "tar" / f"{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for row in range(100):
                value = f"{shard * 100 + row}".encode()
                member = tarfile.TarInfo(f"{shard}-{row:03d}.cls")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    manifest = open_manifest(str(folder / "rows"), progress=False)
    expression = CostExpression.parse("tokens=length")
    write_costs(manifest, expression, index_costs(manifest, expression, progress=False))
    return folder


def _row(name: str, shard: int, row: int, length: int) -> str:
    number = shard * 200 + row
    return json.dumps({"n": number, "length": length, "text": "x" * length, "name": name}) + "\n"


def encode(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def is_even(sample: Mapping[str, Any]) -> bool:
    return bool(sample["n"] % 2 == 0)


def drop_thirds(sample: dict[str, Any]) -> dict[str, Any] | None:
    return None if sample["n"] % 3 == 0 else sample


def mix(folder: Path, **options: Any) -> Mixture:
    names = ("rows", "web", "code")
    kept = options.pop("keep", {})
    sources = {
        name: Source(str(folder / name), weight=weight, **({"keep": kept[name]} if name in kept else {}))
        for name, weight in zip(names, (0.5, 0.3, 0.2), strict=True)
    }
    return Mixture(sources, **options)


def nested(folder: Path) -> Mixture:
    inner = Mixture({"web": Source(str(folder / "web"), weight=2), "code": source_of(folder, "code")}, weight=3)
    return Mixture({"rows": source_of(folder, "rows"), "texts": inner})


def source_of(folder: Path, name: str) -> Source:
    return Source(str(folder / name))


def url(name: str) -> Callable[[Path], str]:
    return lambda folder: str(folder / name)


PACKING = Packing(seq_len=64, field="text", tokenizer=encode, buffer_size=50)
END_TO_END = replace(PACKING, method="concat")
KINDS: dict[str, tuple[Callable[[Path], Any], Mapping[str, Any]]] = {
    "plain": (url("rows"), {"piece": 0}),
    "in order": (url("rows"), {"shuffle": False}),
    "in order on lanes": (url("rows"), {"shuffle": False, "lanes": 8}),
    "rows in pieces": (url("rows"), {}),
    "pieces of ten": (url("rows"), {"piece": 10, "window": 20, "lanes": 8}),
    "lanes and window": (url("rows"), {"lanes": 4, "window": 2, "piece": 0, "seed": 11}),
    "tar": (url("tar"), {"seed": 3}),
    "tar in chunks": (url("tar"), {"seed": 3, "piece": 0, "lanes": 2}),
    "tokens": (url("tokens"), {"format": TokensFormat(seq_len=50)}),
    "a share": (url("rows"), {"subset": Subset.share(0.2, 0.7)}),
    "a count": (url("rows"), {"subset": Subset.take(300, skip=50, seed=5)}),
    "a split": (url("rows"), {"subset": Subset.split({"train": 0.9, "val": 0.1})["val"], "batch_size": 4}),
    "weights": (url("rows"), {"weights": {"0*": 3.0, "*": 1.0}}),
    "weights of a share": (url("rows"), {"weights": {"1*": 0.5, "*": 1.0}, "subset": Subset.share(0, 0.5)}),
    "padded": (url("rows"), {"last_batch": "pad", "batch_size": 7}),
    "partial": (url("rows"), {"last_batch": "partial", "batch_size": 7}),
    "cost": (url("rows"), {"cost": "tokens"}),
    "buckets": (url("rows"), {"bucket": "tokens"}),
    "tokens a batch": (url("rows"), {"batch_tokens": 300, "batch_size": None}),
    "keep": (url("rows"), {"keep": is_even}),
    "keep, partial": (url("rows"), {"keep": is_even, "last_batch": "partial", "batch_size": 9}),
    "keep, in order": (url("rows"), {"keep": is_even, "shuffle": False}),
    "transform drops": (url("rows"), {"transform": drop_thirds, "may_drop": True}),
    "skipped errors": (url("rows"), {"on_error": "skip"}),
    "best fit": (url("rows"), {"packing": PACKING, "batch_size": 4}),
    "end to end": (url("rows"), {"packing": END_TO_END, "batch_size": 4}),
    "mixture": (mix, {}),
    "mixture, one pass of all": (partial(mix, stop="all_exhausted"), {"last_batch": "partial"}),
    "endless mixture": (partial(mix, stop="never"), {"seed": 5}),
    "weights that change": (partial(mix, schedule={100: {"web": 0.9}, 555: {"rows": 0.0}}), {}),
    "stratified": (
        lambda folder: Mixture(
            {name: Source(str(folder / name), weight=4) for name in ("rows", "web")}, stratified=True
        ),
        {},
    ),
    "nested mixture": (nested, {}),
    "mixture that keeps": (partial(mix, keep={"web": is_even}), {}),
    "mixture that drops": (mix, {"transform": drop_thirds, "may_drop": True}),
    "packed mixture": (mix, {"packing": PACKING, "batch_size": 4}),
    "mixture of one": (lambda folder: Mixture({"rows": Source(str(folder / "rows"))}), {}),
}
STREAMS = {name for name, (_, options) in KINDS.items() if {"keep", "may_drop", "packing"} & set(options)}
STREAMS |= {"skipped errors", "mixture that keeps"}


def make(data: Path, kind: str, rank: int = 0, world_size: int = 1) -> DistributedDataLoader[Any]:
    source, options = KINDS[kind]
    given = {"batch_size": 8, "with_ids": True, "memory_limit": "256MiB"} | options
    if world_size > 1 and given["batch_size"] is not None:
        given |= {"batch_size": None, "global_batch_size": given["batch_size"] * world_size}
    return DistributedDataLoader(source(data), rank=rank, world_size=world_size, **given)


def ids_of(loader: DistributedDataLoader[Any], count: int) -> list[list[int]]:
    """The sample ids of the next ``count`` batches, over the ends of epochs; fewer where two epochs hold fewer."""
    found: list[list[int]] = []
    for _ in range(2):
        found += [batch["__id__"].tolist() for batch in itertools.islice(loader, count - len(found))]
        if len(found) == count:
            break
    return found


def digest(ids: list[list[int]]) -> str:
    return f"{len(ids)} {hashlib.blake2b(json.dumps(ids).encode(), digest_size=12).hexdigest()}"


def record(data: Path, kind: str) -> list[dict[str, Any]]:
    """For each position: the state there, and digests of what comes after it, on one rank and on others."""
    with make(data, kind) as loader:
        batches, states, taken = iter(loader), [], 0
        for position in POSITIONS:
            for _ in itertools.islice(batches, position - taken):
                pass
            taken = position
            states.append(json.loads(json.dumps(loader.state_dict())))
    return [{"state": state, "after": after(data, kind, state)} for state in states]


def after(data: Path, kind: str, state: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the batches behind a state: on one rank, and of each rank where ranks need not talk."""
    worlds = (1,) if kind in STREAMS else (1, LATER_WORLD)
    found = {}
    for world_size in worlds:
        for rank in range(world_size):
            with make(data, kind, rank, world_size) as loader:
                loader.load_state_dict(state)
                assert json.loads(json.dumps(loader.state_dict())) == state, "saved again, it is the same"
                found[f"rank {rank} of {world_size}"] = digest(ids_of(loader, BATCHES // world_size))
    return found


def recorded() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return found


@pytest.mark.skipif("PENSTOCK_UPDATE_GOLDEN" not in os.environ, reason="adds kinds of loaders to the recordings")
def test_add_recordings(data: Path) -> None:
    found = recorded()
    found |= {kind: record(data, kind) for kind in KINDS if kind not in found}
    RECORDED.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")


def test_every_kind_of_loader_is_recorded() -> None:
    assert set(recorded()) == set(KINDS)
    versions = {entry["state"]["version"] for entries in recorded().values() for entry in entries}
    assert versions == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_state_continues_with_the_recorded_batches(data: Path, kind: str) -> None:
    for entry in recorded()[kind]:
        assert after(data, kind, entry["state"]) == entry["after"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_passes_through_the_recorded_states(data: Path, kind: str) -> None:
    with make(data, kind) as loader:
        batches, taken = iter(loader), 0
        for position, entry in zip(POSITIONS, recorded()[kind], strict=True):
            for _ in itertools.islice(batches, position - taken):
                pass
            taken = position
            assert json.loads(json.dumps(loader.state_dict())) == entry["state"]
