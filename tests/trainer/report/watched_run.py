"""Two ranks that train until they are ended, the second one slowly: what people look at while it runs."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from penstock import DistributedDataLoader
from penstock.trainer import DistributedTrainer, ReportConfig, TrainerConfig, open_world


def main(data: str, output: str, port: str) -> None:
    world = open_world(device="cpu")

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        time.sleep(0.05 if world.rank == 1 else 0.005)
        x = batch["x"].float().reshape(-1, 1)
        return model(x).square().sum(), len(x)

    model = torch.nn.Linear(1, 1)
    report = ReportConfig(every=5, quiet=True, prometheus_port=int(port), status_s=0.5)
    config = TrainerConfig(epochs=10**6, output_dir=output, report=report)
    with DistributedDataLoader(data, batch_size=8, transform=dict, threads=1) as loader:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DistributedTrainer(model, optimizer, loader, config, loss=loss) as trainer:
            trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
