"""Checkpoints in a store in memory, and which objects they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from saved_nets import build, fill

from penstock.storage import (
    MemoryStore,
)
from penstock.trainer import (
    CheckpointConfig,
    World,
)
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.remote.layout import list_stored, read_stored


def make_config(bucket: MemoryStore, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(folder=bucket.url, **options)


def keys_in(bucket: MemoryStore) -> list[str]:
    return [info.key for info in bucket.list()]


def named_keys(bucket: MemoryStore) -> list[str]:
    """What the manifests name, and themselves: all that should be there when no run is."""
    keys = []
    for step in list_stored(bucket):
        stored = read_stored(bucket, step)
        keys += [f"manifests/step-{step}.json"]
        keys += [part.key for name in stored.parts for part in stored.parts_of(name)]
    return sorted(keys)


def save_steps(bucket: MemoryStore, world: World, *steps: int, **config: Any) -> None:
    """Save steps whose weights are all the step's number."""
    net, optimizer = build()
    with Checkpointer(make_config(bucket, **config), world) as checkpoints:
        for step in steps:
            fill(net, float(step))
            checkpoints.save(step, net, optimizer, {"step": step}, blocking=True)


def notes_in(folder: Path) -> list[str]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["note"] for record in records if record["kind"] == "note"]
