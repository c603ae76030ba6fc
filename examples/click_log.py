"""Train a click model on the rows of a Parquet log; columns stay columns from the file to the batch.

    python examples/click_log.py                                  on a made-up log in a temporary folder
    python examples/click_log.py s3://bucket/clicks/              on yours, with columns of the same names
    torchrun --nproc-per-node=8 examples/click_log.py s3://...    the same, on eight ranks

Only the named columns are fetched, and no row is ever a Python object: a batch is cut from whole columns. The last
batch of an epoch is filled up, and the mask ``__valid__`` says which rows count.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import DistributedDataLoader

CATEGORIES = ("user", "item", "country")
NUMBERS = ("age", "price", "hour")
BUCKETS = 1000


def make_log(folder: str, rows: int = 200_000, files: int = 4) -> None:
    """Clicks that depend on the item, the price, and the hour."""
    Path(folder).mkdir()
    rng = np.random.default_rng(0)
    taste = rng.normal(0, 1.5, BUCKETS)
    for number in range(files):
        count = rows // files
        columns = {name: rng.integers(0, BUCKETS, count) for name in CATEGORIES}
        columns |= {name: rng.normal(0, 1, count).astype(np.float32) for name in NUMBERS}
        logit = taste[columns["item"]] - columns["price"] + 0.5 * columns["hour"] - 1
        columns["clicked"] = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.int8)
        columns["never_read"] = rng.random(count)
        pq.write_table(pa.table(columns), f"{folder}/part-{number}.parquet", row_group_size=16_384)


class ClickModel(nn.Module):
    """An embedding for each category, and a small network over the embeddings and the numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({name: nn.Embedding(BUCKETS, width) for name in CATEGORIES})
        self.layers = nn.Sequential(nn.Linear(width * len(CATEGORIES) + len(NUMBERS), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [embedding(batch[name].long() % BUCKETS) for name, embedding in self.embeddings.items()]
        numbers = torch.stack([batch[name].float() for name in NUMBERS], dim=1)
        return self.layers(torch.cat([*parts, numbers], dim=1)).squeeze(1)


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as folder:
        if options.url is None:
            make_log(f"{folder}/clicks")
        train(options.url or f"{folder}/clicks", options)


def train(url: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model: nn.Module = ClickModel()
    if "RANK" in os.environ:
        dist.init_process_group()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with DistributedDataLoader(
        url, batch_size=options.batch_size, columns=[*CATEGORIES, *NUMBERS, "clicked"], last_batch="pad"
    ) as loader:
        for epoch in range(options.epochs):
            total = count = 0.0
            for batch in loader:
                valid = batch["__valid__"]
                losses = nn.functional.binary_cross_entropy_with_logits(
                    model(batch), batch["clicked"].float(), reduction="none"
                )
                loss = losses[valid].sum() / len(valid)  # by the full size: a row weighs the same on every rank
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += losses[valid].sum().item()
                count += int(valid.sum())
            if os.environ.get("RANK", "0") == "0":
                waited_s = loader.metrics().consumer_wait_s
                print(f"epoch {epoch}: {count:,.0f} rows, loss {total / count:.4f}, {waited_s:.2f} s waiting")
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="prefix of the parquet files; credentials come from the environment")
    parser.add_argument("--batch-size", type=int, default=4096, help="rows per rank")
    parser.add_argument("--epochs", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
