"""Values for every argument of a loader, of a mixture and of a source: valid ones, and ones that are refused.

Each is made anew for a loader, from the folder of ``data.make_data`` and an empty folder of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from made_mesh import mesh_of

from penstock import (
    DistributedDataLoader,
    Mixture,
    Packing,
    SequenceCut,
    Source,
    Subset,
    TokenBudget,
    TokensFormat,
    open_manifest,
)
from penstock.loader import Bucket, Cost, ImageDecoder, Keep


@dataclass(frozen=True)
class Places:
    """Where the data lie, and a folder that nothing has used before."""

    data: Path
    fresh: Path

    def of(self, name: str) -> str:
        return str(self.data / name)


Value = Callable[[Places], Any]


class AsIs:
    """A value that needs no place."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, places: Places) -> Any:
        return self._value


def encode(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def is_even(sample: Mapping[str, Any]) -> bool:
    return bool(sample["n"] % 2 == 0)


def are_even(columns: Mapping[str, Any]) -> Any:
    return np.asarray(columns["n"]) % 2 == 0


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"n": sample["n"] * 2}


def first(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return samples[0]


def at(name: str) -> Value:
    return lambda places: places.of(name)


def fresh(places: Places) -> str:
    return str(places.fresh)


def pair(**options: Any) -> Value:
    """A mixture of two data sets of the same fields."""
    return lambda places: Mixture({name: Source(places.of(name)) for name in ("rows", "more")}, **options)


def one(**options: Any) -> Value:
    """A mixture of one source, which has the given values of its own."""
    return lambda places: Mixture(
        {"rows": Source(places.of("rows"), **{name: value(places) for name, value in options.items()})}
    )


def packed(**options: Any) -> Value:
    return lambda places: Packing(**({"seq_len": 16, "field": "text", "tokenizer": encode, "buffer_size": 8} | options))


NONE = AsIs(None)
MESH = mesh_of(("dp", "pp", "cp"), (2, 2, 2), (1, 0, 1))

LOADER: dict[str, dict[str, Value]] = {
    "source": {
        "tar": at("tar"),
        "tokens": at("tokens"),
        "splits": at("splits"),
        "absent": at("absent"),
        "pattern": at("rows/*.jsonl"),
        "pattern of nothing": at("rows/*.tar"),
        "list": lambda places: [places.of("rows/0.jsonl"), places.of("rows/1.jsonl")],
        "empty list": AsIs([]),
        "number": AsIs(3),
        "dict": AsIs({"rows": 1}),
        "manifest": lambda places: open_manifest(places.of("rows"), progress=False),
        "mixture": pair(),
        "endless mixture": pair(stop="never"),
        "mixture that keeps": one(keep=AsIs(is_even)),
        "mixture that packs": one(packing=packed()),
        "mixture of unlike": lambda places: Mixture({name: Source(places.of(name)) for name in ("rows", "tar")}),
        "mixture of nothing": lambda places: Mixture({"absent": Source(places.of("absent"))}),
    },
    "split": {"train": AsIs("train"), "all": AsIs("all"), "unknown": AsIs("trian"), "list": AsIs(["train", "test"])},
    "batch_size": {"none": NONE, "4": AsIs(4), "0": AsIs(0), "text": AsIs("4"), "beyond": AsIs(1000)},
    "global_batch_size": {"6": AsIs(6), "7": AsIs(7), "0": AsIs(0), "float": AsIs(6.0)},
    "shuffle": {"false": AsIs(False), "number": AsIs(100)},
    "seed": {"5": AsIs(5), "negative": AsIs(-1), "text": AsIs("five")},
    "lanes": {"2": AsIs(2), "3": AsIs(3), "text": AsIs("atuo"), "0": AsIs(0)},
    "window": {"3": AsIs(3), "0": AsIs(0), "text": AsIs("wide")},
    "piece": {"0": AsIs(0), "2": AsIs(2), "negative": AsIs(-2), "text": AsIs("none")},
    "subset": {
        "share": AsIs(Subset.share(0, 0.5)),
        "of nothing": lambda _: Subset.share(0.5, 0.5),
        "beyond": AsIs(Subset.take(1000)),
        "split": AsIs(Subset.split({"train": 0.9, "val": 0.1})),
        "number": AsIs(0.5),
    },
    "weights": {
        "patterns": AsIs({"0*": 2.0, "*": 1.0}),
        "patterns that miss": AsIs({"0*": 2.0}),
        "each": AsIs([1.0] * 40),
        "too few": AsIs([1.0, 2.0]),
        "negative": AsIs({"*": -1.0}),
    },
    "columns": {
        "n": AsIs(["n"]),
        "unknown": AsIs(["m"]),
        "key": AsIs(["__key__"]),
        "none": AsIs([]),
        "text": AsIs("n"),
    },
    "decode": {
        "none": NONE,
        "by name": AsIs({"text": str.upper}),
        "of a number": AsIs({"n": str}),
        "unknown": AsIs({"m": str}),
        "text": AsIs("none"),
        "on a device": AsIs({"text": ImageDecoder(size=8, device="cuda")}),
    },
    "raw": {"view": AsIs("view"), "unknown": AsIs("views")},
    "keep": {
        "function": AsIs(is_even),
        "columns": AsIs(Keep(["n"], are_even)),
        "unknown columns": AsIs(Keep(["m"], are_even)),
        "text": AsIs("even"),
    },
    "transform": {"function": AsIs(double), "text": AsIs("double")},
    "may_drop": {"true": AsIs(True), "number": AsIs(1)},
    "packing": {
        "best fit": packed(),
        "end to end": packed(method="concat"),
        "unknown field": packed(field="words"),
        "of a mask": packed(mask_field="n", tokenizer=None),
        "no length": packed(seq_len=1),
        "number": AsIs(2048),
    },
    "collate": {"function": AsIs(first), "number": AsIs(3)},
    "cost": {"index": AsIs("tokens"), "cost": AsIs(Cost(index="tokens")), "unknown": AsIs("length"), "number": AsIs(3)},
    "bucket": {"index": AsIs("tokens"), "bucket": AsIs(Bucket(index="tokens")), "unknown": AsIs("length")},
    "batch_tokens": {
        "100": AsIs(100),
        "whole": AsIs(TokenBudget(tokens=200, whole=True)),
        "not padded": AsIs(TokenBudget(tokens=100, padded=False)),
        "too few": AsIs(3),
        "0": AsIs(0),
        "unknown": AsIs(TokenBudget(tokens=100, index="length")),
    },
    "last_batch": {"pad": AsIs("pad"), "partial": AsIs("partial"), "unknown": AsIs("keep")},
    "device": {"cpu": AsIs("cpu"), "unknown": AsIs("tpu"), "cuda": AsIs("cuda")},
    "threads": {"1": AsIs(1), "0": AsIs(0), "text": AsIs("two")},
    "fetch_threads": {"2": AsIs(2), "0": AsIs(0), "text": AsIs("autp")},
    "read_ahead": {"1 MB": AsIs("1MB"), "0": AsIs(0), "text": AsIs("much"), "more than memory": AsIs("1TiB")},
    "autotune": {"false": AsIs(False), "true": AsIs(True), "text": AsIs("on")},
    "processes": {"auto": AsIs("auto"), "1": AsIs(1), "negative": AsIs(-1), "text": AsIs("one")},
    "memory_limit": {"256 MiB": AsIs("256MiB"), "few": AsIs(1000), "text": AsIs("all"), "negative": AsIs(-1)},
    "cache_dir": {"folder": fresh, "file": at("rows/0.jsonl")},
    "cache_limit": {"1 MiB": AsIs("1MiB"), "text": AsIs("all"), "0": AsIs(0)},
    "rank": {"0": AsIs(0), "1": AsIs(1), "negative": AsIs(-1), "text": AsIs("0")},
    "world_size": {"1": AsIs(1), "2": AsIs(2), "0": AsIs(0)},
    "mesh": {
        "three dims": AsIs(MESH),
        "pp alone": AsIs(mesh_of(("pp",), (2,), (0,))),
        "left": AsIs(mesh_of(("dp",), (2,), None)),
    },
    "data_dims": {"dp": AsIs(["dp"]), "unknown": AsIs(["xp"]), "pp": AsIs(["dp", "pp"])},
    "fields_by_stage": {
        "first and last": AsIs({"text": "first", "n": "last"}),
        "third": AsIs({"text": 2}),
        "unknown": AsIs({"words": "first"}),
        "list": AsIs(["text"]),
        "empty": AsIs({}),
    },
    "sequence_cut": {
        "text": AsIs(SequenceCut(["text"])),
        "unknown": AsIs(SequenceCut(["words"])),
        "of another dim": AsIs(SequenceCut(["text"], mesh_dim="tp")),
        "list": AsIs(["text"]),
    },
    "storage_options": {"empty": AsIs({}), "unknown": AsIs({"endpont": "x"}), "text": AsIs("region")},
    "with_ids": {"true": AsIs(True)},
    "format": {
        "jsonl": AsIs("jsonl"),
        "unknown": AsIs("jsnol"),
        "tokens": AsIs(TokensFormat(seq_len=8)),
        "class": AsIs(TokensFormat),
    },
    "audit_dir": {"folder": fresh, "file": at("rows/0.jsonl")},
    "on_error": {"skip": AsIs("skip"), "replace": AsIs("replace"), "unknown": AsIs("ignore")},
    "max_errors": {"3": AsIs(3), "share": AsIs(0.1), "1.5": AsIs(1.5), "negative": AsIs(-1)},
    "max_bad_chunks": {"0": AsIs(0), "1": AsIs(1), "negative": AsIs(-1), "text": AsIs("1")},
    "quarantine": {"folder": fresh, "file": at("rows/0.jsonl")},
    "avoid": {"written": at("bad"), "absent": at("absent"), "own": fresh, "number": AsIs(3)},
    "num_workers": {"2": AsIs(2)},
}

SOURCE: dict[str, dict[str, Value]] = {
    "url": {
        "tar": at("tar"),
        "splits": at("splits"),
        "absent": at("absent"),
        "number": AsIs(3),
        "tokens": at("tokens"),
    },
    "weight": {
        "2": AsIs(2),
        "0": AsIs(0),
        "0.5": AsIs(0.5),
        "negative": AsIs(-1),
        "text": AsIs("1"),
        "true": AsIs(True),
    },
    **{
        name: LOADER[name]
        for name in (
            *("columns", "decode", "keep", "transform", "may_drop", "packing", "format", "storage_options", "split"),
            "subset",
        )
    },
}


def nested(**options: Any) -> Value:
    return lambda places: {
        "rows": Source(places.of("rows")),
        "in": Mixture({"b": Source(places.of("more"))}, **options),
    }


MIXTURE: dict[str, dict[str, Value]] = {
    "sources": {
        "urls": lambda places: {places.of("rows"): 0.5, places.of("more"): 0.5},
        "nested": nested(),
        "nested, endless": nested(stop="never"),
        "nested, stratified": nested(stratified=True),
        "nested of no weight": nested(weight=0),
        "empty": AsIs({}),
        "list": AsIs(["rows"]),
        "no name": lambda places: {"": Source(places.of("rows"))},
        "alike": lambda places: {"a/b": Source(places.of("rows")), "a": Mixture({"b": Source(places.of("more"))})},
        "of unlike columns": lambda places: {n: Source(places.of(n)) for n in ("rows", "tokens")},
        "of unlike packing": lambda places: {
            "rows": Source(places.of("rows"), packing=packed()(places)),
            "more": Source(places.of("more")),
        },
        "of unlike transforms": lambda places: {
            "rows": Source(places.of("rows"), transform=double),
            "more": Source(places.of("more")),
        },
    },
    "stop": {"never": AsIs("never"), "all": AsIs("all_exhausted"), "unknown": AsIs("al_exhausted")},
    "schedule": {
        "later": AsIs({100: {"rows": 0.9}}),
        "to nothing": AsIs({100: {"rows": 0, "more": 0}}),
        "unknown": AsIs({100: {"row": 0.9}}),
        "from 0": AsIs({0: {"rows": 0.9}}),
        "no position": AsIs({-5: {"rows": 0.9}}),
        "list": AsIs([100]),
        "no weights": AsIs({100: 0.9}),
    },
    "stratified": {"true": AsIs(True), "number": AsIs(1)},
    "weight": {"2": AsIs(2), "0": AsIs(0), "negative": AsIs(-1), "nan": AsIs(float("nan"))},
}


def load(source: Any, places: Places, options: Mapping[str, Value]) -> DistributedDataLoader[Any]:
    """A loader with some arguments; of four samples a batch, where nothing else says how many."""
    given = {name: value(places) for name, value in options.items()}
    if not {"batch_size", "global_batch_size", "batch_tokens"} & set(given):
        given["batch_size"] = 4
    return DistributedDataLoader(given.pop("source", source), **given)


@dataclass(frozen=True)
class Family:
    """A constructor: the values of its arguments, and how a loader is opened with some of them.

    One that says the same as another, word for word, is recorded ``under`` the other's name alone.
    """

    choices: Mapping[str, Mapping[str, Value]]
    open: Callable[[Places, Mapping[str, Value]], DistributedDataLoader[Any]]
    under: str | None = None


def _open_source(places: Places, options: Mapping[str, Value]) -> DistributedDataLoader[Any]:
    given = {"url": at("rows"), **options}
    source = Source(given.pop("url")(places), **{name: value(places) for name, value in given.items()})
    return load(Mixture({"rows": source, "more": Source(places.of("more"))}), places, {})


def _open_mixture(places: Places, options: Mapping[str, Value]) -> DistributedDataLoader[Any]:
    given = {name: value(places) for name, value in options.items()}
    sources = given.pop("sources", {name: Source(places.of(name)) for name in ("rows", "more")})
    return load(Mixture(sources, **given), places, {})


def _without_source() -> dict[str, dict[str, Value]]:
    return {name: values for name, values in LOADER.items() if name != "source"}


FAMILIES: dict[str, Family] = {
    "loader": Family(LOADER, lambda places, options: load(places.of("rows"), places, options)),
    "loader of a mixture": Family(_without_source(), lambda places, options: load(pair()(places), places, options)),
    "loader of a mixture of one": Family(
        _without_source(),
        lambda places, options: load(one()(places), places, options),
        under="loader of a mixture",
    ),
    "loader of a mixture that keeps": Family(
        _without_source(), lambda places, options: load(one(keep=AsIs(is_even))(places), places, options)
    ),
    "source": Family(SOURCE, _open_source),
    "mixture": Family(MIXTURE, _open_mixture),
}
