"""AUC of the click model under the policies of a parameter server, beside one process with batches of the same size.

Both with its embeddings in the model, which workers hold whole, and with tables on the servers.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.trainer import ArrayLoader
from penstock.trainer.asynchronous.local_run import train_locally
from penstock.trainer.recipes.clicks import read_clicks
from penstock.trainer.recipes.recipe import Recipe, build_recipe, read_tables

from .arguments import OptionalPath, parse_config

_BATCH = 528
_CASES = (
    # workers, samples of all their batches together, policy
    (1, _BATCH, "bsp"),
    (3, _BATCH, "ssp(0)"),
    (1, _BATCH // 3, "bsp"),
    (3, _BATCH, "ssp(4)"),
    (3, _BATCH, "ssp(16)"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """AUC of the click model under each policy; workers and two shards are threads of this process."""

    rows: int = 100_000
    """Rows of the click log, of which the last tenth is held out."""

    epochs: int = 2
    """Epochs of each run."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


@cache
def _read(split: str, rows: int) -> dict[str, Any]:
    parts = list(read_clicks(split, rows=rows))
    return {name: np.concatenate([one.column(name).to_numpy() for one in parts]) for name in parts[0].schema.names}


def load(split: str, rows: int, **options: Any) -> ArrayLoader:
    """Open the click log in memory."""
    return ArrayLoader(_read(split, rows), **options)


def make_recipe(config: Config, folder: str, *, batch: int, policy: str, is_served: bool) -> Recipe:
    """The recipe ``clicks`` on data in memory, over a parameter server, where its embeddings lie, too, if served."""
    tables = read_tables("clicks")
    name = "devtools.click_policies:load"
    tables["model"]["args"]["served"] = is_served
    train = {"split": "train", "rows": config.rows, "global_batch_size": batch, "seed": 0}
    held_out = {"split": "test", "rows": config.rows, "global_batch_size": 2064, "shuffle": False, "last_batch": "pad"}
    tables["data"] = {"use": name, "args": train}
    tables["evaluation"]["data"] = {"use": name, "args": held_out}
    tables["trainer"] = {
        "epochs": config.epochs,
        "output_dir": folder,
        "device": "cpu",
        "precision": {"dtype": "fp32"},
        "schedule": tables["trainer"]["schedule"],
        "report": {"quiet": True},
        "parallel": {"mode": "parameter_server"},
        "server": {"policy": policy},
    }
    return build_recipe(tables)


def main(config: Config) -> None:
    torch.set_num_threads(1)
    rows = []
    for is_served, (workers, batch, policy) in product((False, True), _CASES):
        with tempfile.TemporaryDirectory() as folder:
            recipe = make_recipe(config, folder, batch=batch, policy=policy, is_served=is_served)
            started = time.process_time()
            summary = train_locally(recipe, workers=workers, shards=2)
            cpu_s = time.process_time() - started
        is_merged = policy in ("bsp", "ssp(0)")
        updates = summary.steps if is_merged else summary.samples * workers // batch
        row: dict[str, Any] = {"embeddings": "on the servers" if is_served else "in the model"}
        row |= {"workers": workers, "batch": batch // workers, "policy": policy, "updates": updates}
        row |= {"auc": summary.metrics["auc"], "loss": summary.metrics["loss"]}
        rows.append(row | {"seconds": summary.seconds, "cpu_seconds": cpu_s})
        print("  ".join(f"{name} {round(one, 4) if isinstance(one, float) else one}" for name, one in rows[-1].items()))
    if config.out is not None:
        found = {
            "command": "python -m devtools click_policies",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": list_versions(),
            "rows": config.rows,
            "epochs": config.epochs,
            "runs": rows,
        }
        config.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config, __doc__))
