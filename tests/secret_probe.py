"""Does to a store what users do, and shows whatever fails as fully as programs do; run by test_secrets.py.

Reads from stdin a list of {"url", "options", "source" (a folder of shards), "key" (of encryption, hex), "train" (bool)}
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import penstock.storage.retrying.retry as retry
from penstock import DistributedDataLoader, open_store, pack
from penstock.cli import run
from penstock.storage import ByteRange, RetryConfig, open_client


def show(what: str, act: Callable[[], object]) -> None:
    """Act, and print the result, or the error with all its causes in every form that a program prints."""
    try:
        print(what, "->", repr(act())[:2000])
    except (Exception, SystemExit) as exc:
        traceback.print_exception(exc)
        seen: list[BaseException | None] = [exc]
        while (last := seen[-1]) is not None:
            print(what, "raised", repr(last), str(last), last.args, getattr(last, "__notes__", ""))
            seen.append(last.__cause__ or (None if last.__suppress_context__ else last.__context__))
        logging.exception("%s failed", what)


def load(url: str, options: dict[str, Any]) -> object:
    loader = DistributedDataLoader(
        url, batch_size=2, storage_options=options, cache_dir="cache", audit_dir="audit", max_bad_chunks=1
    )
    with loader:
        print(repr(loader), repr(vars(loader.metrics()) if hasattr(loader.metrics(), "__dict__") else loader.metrics()))
        print(loader.state_dict())
        return [len(batch) for batch in loader]


def train(url: str, options: dict[str, Any]) -> object:
    import torch

    from penstock.trainer import CheckpointConfig, DistributedTrainer, TrainerConfig

    def loss(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(torch.ones(len(batch["txt"]), 2))
        return out.sum(), torch.tensor(float(len(out)))

    with DistributedDataLoader(url, batch_size=2, storage_options=options, seed=1, shuffle=True) as loader:
        model = torch.nn.Linear(2, 1)
        config = TrainerConfig(output_dir="run", epochs=1, checkpoint=CheckpointConfig(every_steps=2, background=False))
        trainer = DistributedTrainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, config, loss=loss)
        return trainer.train()


def main() -> None:
    logging.basicConfig(level=logging.DEBUG)
    warnings.simplefilter("always")
    retry.RetryConfig = partial(RetryConfig, deadline_s=0.2, warn_after_s=0)  # type: ignore[assignment, misc]
    for given in json.load(sys.stdin):
        probe(given)


def probe(given: dict[str, Any]) -> None:
    url, options = given["url"], given["options"]
    if "key" in given:
        options["encryption_key"] = bytes.fromhex(given["key"])
    if given.get("train"):
        show("train", lambda: train(url, options))
        return
    show("open_client", lambda: open_client(url, options))
    show("open_store", lambda: open_store(url, storage_options=options))
    asks: dict[str, Callable[[Any], object]] = {
        "list": lambda store: list(store.list()),
        "head": lambda store: store.head("a.tar"),
        "get": lambda store: store.get("a.tar"),
        "range": lambda store: store.get("a.tar", ByteRange(0, 4), etag="1"),
        "put": lambda store: store.put("a.tar", b"data"),
        "put_if": lambda store: store.put_if("a.tar", b"data", etag=None),
        "delete": lambda store: store.delete(["a.tar", "b.tar"]),
    }
    for name, ask in asks.items():
        show(name, lambda ask=ask: ask(open_store(url, storage_options=options)))  # type: ignore[misc]
    show("load", lambda: load(url, options))
    show("load one", lambda: load(url + "/a.tar", options))
    show("pack", lambda: pack(given["source"], url, storage_options=options, progress=False))
    words = [word for name, value in options.items() if isinstance(value, str) for word in
             ("--storage-option", f"{name}={value}")]  # fmt: skip
    for command in ("index", "verify", "inspect", "plan", "bench"):
        show(command, lambda command=command: run([command, url, *words]))  # type: ignore[misc]
    show("pack command", lambda: run(["pack", given["source"], url, *words]))


if __name__ == "__main__":
    main()
