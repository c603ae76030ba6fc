"""What users send to ranks, workers and jobs arrives as it was: by mp.spawn, Ray or submitit, which pickle it."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import (
    DistributedDataLoader,
    ImageDecoder,
    Manifest,
    Mixture,
    Packing,
    SequenceCut,
    Source,
    Subset,
    TokenBudget,
    TokensFormat,
    open_manifest,
    pack,
    verify,
)
from penstock.loader import Keep, LoaderMetrics
from penstock.storage import ByteRange, ObjectInfo
from penstock.trainer import (
    ArrayLoader,
    AveragingConfig,
    EvaluateConfig,
    ExpertsConfig,
    FailureRecord,
    ServerEmbedding,
    TrainerConfig,
    World,
)

FACES = ("penstock", "penstock.loader", "penstock.storage", "penstock.trainer")
ROWS = 20


def is_even(sample: dict[str, Any]) -> bool:
    return int(sample["n"]) % 2 == 0


def are_even(columns: Any) -> Any:
    return columns["n"] % 2 == 0


def add_one(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(sample["n"]) + 1}


def count_letters(texts: list[str]) -> list[list[int]]:
    return [[len(text)] for text in texts]


def write_data(folder: Path) -> str:
    folder.mkdir()
    pq.write_table(pa.table({"n": np.arange(ROWS)}), folder / "a.parquet")
    return str(folder)


def read_metrics(source: Any) -> LoaderMetrics:
    with DistributedDataLoader(source, batch_size=4, rank=0, world_size=1) as loader:
        next(iter(loader))
        return loader.metrics()


# Made of a folder with 20 rows. Classes that need no arguments are not listed.
SENT: dict[str, Callable[[str], Any]] = {
    "ByteRange": lambda _: ByteRange(3, 5),
    "Keep": lambda _: Keep(["n"], are_even),
    "Manifest": open_manifest,
    "Mixture": lambda url: Mixture(
        {
            "a": Source(url, weight=2, packing=Packing(seq_len=8), columns=["n"]),
            "b": Mixture({url: 1, "d": Source(url, keep=is_even, transform=add_one, may_drop=True)}),
        },
        stop="never",
        schedule={40: {"a": 1}},
    ),
    "ObjectInfo": lambda _: ObjectInfo("a", 3),
    "Packing": lambda _: Packing(seq_len=8, field="txt", tokenizer=count_letters, eos=0, fields=["tokens"]),
    "SequenceCut": lambda _: SequenceCut(["tokens"]),
    "Source": lambda url: Source(url, decode={"jpg": ImageDecoder(size=8)}, keep=Keep(["n"], are_even)),
    "Subset": lambda _: Subset.share(0.0, 0.9),
    "TokenBudget": lambda _: TokenBudget(tokens=100),
    "TokensFormat": lambda _: TokensFormat(seq_len=8),
    "TrainerConfig": lambda _: TrainerConfig(steps=3, evaluate=EvaluateConfig()),
    "AveragingConfig": lambda _: AveragingConfig(average_every=2),
    "ArrayLoader": lambda _: ArrayLoader({"n": np.arange(8)}, batch_size=2),
    "World": lambda _: World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    ),
    "ExpertsConfig": lambda _: ExpertsConfig(num_experts=4),
    "ServerEmbedding": lambda _: ServerEmbedding("items", 4),
    "FailureRecord": lambda _: FailureRecord(step=3, error="a rank failed"),
    # and what comes back from ranks
    "LoaderMetrics": read_metrics,
    "MixtureMetrics": lambda url: read_metrics(Mixture({url: 1})),
    "PackSummary": lambda url: pack(url, f"{url}-packed", format="jsonl"),
    "VerifyResult": verify,
}
# Made by functions, of numbers and texts alone; or protocols, stores (whose contract has its own test), and what owns
# threads, files or a process group.
NOT_LISTED = {
    *(
        "AuditReport",
        "BadChunk",
        "BatchView",
        "ByteViews",
        "Call",
        "CheckpointRecord",
        "CostExpression",
        "DatasetView",
        "EndRecord",
        "Llama",
        "Mesh",
    ),
    *(
        "EpochAccount",
        "EvaluationRecord",
        "Evaluation",
        "Export",
        "Forecast",
        "FieldView",
        "Flaw",
        "GatheredBytes",
        "Inspection",
    ),
    *("NoteRecord", "Quarantined", "RecheckResult", "Rechecked", "ResumeRecord", "RewindRecord", "SampleInspection"),
    *("SourceAccount", "SourceProgress", "Spread", "StartRecord", "StepRecord", "Summary", "TrainRecord"),
    *("CacheStore", "DiscardingStore", "EncryptedStore", "FieldDecoder", "LocalStore", "MemoryStore", "MetricsServer"),
    *("Observer", "RetryStore", "ShardFormat", "Store", "DistributedDataLoader", "DistributedTrainer"),
}


def public_classes() -> dict[str, type]:
    """The classes of all faces that are neither errors nor warnings."""
    faces = map(importlib.import_module, FACES)
    found = {name: getattr(face, name) for face in faces for name in dir(face)}
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value) and not issubclass(value, Exception | Warning)
    }


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Manifest):
        return one.fingerprint == other.fingerprint
    return bool(one == other) if dataclasses.is_dataclass(one) else vars(one).keys() == vars(other).keys()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("sending") / "data")


@pytest.mark.parametrize("name", sorted(public_classes().keys() - NOT_LISTED))
def test_what_users_configure_is_pickled_and_copied_as_it_was(url: str, name: str) -> None:
    made = SENT[name](url) if name in SENT else public_classes()[name]()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert is_same(made, pickle.loads(pickle.dumps(made, protocol)))
    for copied in (copy.copy(made), copy.deepcopy(made)):
        assert type(copied) is type(made)
        assert is_same(made, copied)
        assert repr(copied) == repr(made) or not dataclasses.is_dataclass(made)


def test_every_public_class_is_known_to_be_sent_or_not() -> None:
    assert SENT.keys() | NOT_LISTED <= public_classes().keys()
    assert not SENT.keys() & NOT_LISTED


def test_errors_arrive_as_they_were_raised() -> None:
    faces = [importlib.import_module(face) for face in FACES]
    for error in {getattr(face, name) for face in faces for name in dir(face)}:
        if not (inspect.isclass(error) and issubclass(error, Exception)):
            continue
        own = inspect.signature(error.__init__).parameters if inspect.isfunction(error.__init__) else {}
        needed = [p.name for p in own.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        made = error(*(7 if name in ("rank", "offset") else f"told {name}" for name in needed or ["what"]))
        sent = pickle.loads(pickle.dumps(made))
        assert (type(sent), str(sent), vars(sent)) == (error, str(made), vars(made))


def test_a_copied_source_takes_from_the_loader_what_it_was_not_given(url: str) -> None:
    given = Mixture({"a": Source(url), "b": Source(url, transform=None)}, stop="all_exhausted")
    for mixture in (given, copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        with DistributedDataLoader(mixture, batch_size=2 * ROWS, with_ids=True, transform=add_one) as loader:
            batch = next(iter(loader))
        added = batch["n"] - batch["__id__"]
        assert added.tolist() == [1 - source for source in batch["__source__"].tolist()]


def read_on_rank(rank: int, mixture: Mixture, answers: Any) -> None:
    with DistributedDataLoader(mixture, batch_size=4, rank=rank, world_size=2, with_ids=True) as loader:
        answers.put((rank, [batch["n"].tolist() for batch in loader]))


@pytest.mark.slow
def test_a_mixture_that_is_sent_to_ranks_gives_them_their_shares(url: str) -> None:
    mixture = Mixture({"a": Source(url, keep=None), "b": Source(url, transform=add_one)}, stop="all_exhausted")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=read_on_rank, args=(rank, mixture, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=300) for _ in ranks)
    for process in ranks:
        process.join()
    for rank in range(2):
        with DistributedDataLoader(mixture, batch_size=4, rank=rank, world_size=2) as loader:
            assert found[rank] == [batch["n"].tolist() for batch in loader]
