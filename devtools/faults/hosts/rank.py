"""One rank of a job on several hosts: trains, or reads without a trainer, and tells of each batch.

python -m devtools.faults.hosts.rank JOB.json     (under torchrun)
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.benchmarks.child_arguments import take_arguments
from penstock.loader.data_loader import DistributedDataLoader
from penstock.trainer.checkpoint.config import CheckpointConfig
from penstock.trainer.config import TrainerConfig
from penstock.trainer.errors import StallError
from penstock.trainer.evaluation.evaluate import EvaluateConfig, Evaluation
from penstock.trainer.parallel.config import ParallelConfig
from penstock.trainer.parallel.precision import PrecisionConfig
from penstock.trainer.ranks.world import close_world, open_world
from penstock.trainer.report.config import ReportConfig
from penstock.trainer.trainer import DistributedTrainer
from penstock.trainer.watch.watchdog import EXIT_STALLED

from ..data import digest_of, payload_of
from ..reader import Log
from .job import HostJob

_SAVE_WIDTH = 400_000  # a model whose save takes a while
_POLL_S = 0.02


def keep(sample: Mapping[str, Any]) -> bool:
    """Drops a fifth; slow, so that ranks do not run far ahead of what they tell each other."""
    time.sleep(0.01)
    return int(sample["__key__"]) % 5 != 0


class HostRank:
    """The loop of one rank."""

    def __init__(self, job: HostJob, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._log = Log(job.log_of(rank))

    def run(self) -> int:
        self._reach("start", pid=os.getpid())
        try:
            code = self._train() if self._job.trains else self._read()
        except Exception as exc:
            self._log.tell(kind="error", error=type(exc).__name__, message=str(exc))
            if isinstance(exc, StallError):
                return EXIT_STALLED
            raise
        self._log.tell(kind="done")
        return code

    def _reach(self, place: str, **more: Any) -> None:
        """Tell where this rank is, and wait there where the job says so."""
        self._log.tell(kind=place, **more)
        while self._job.waits_at == place and not Path(self._job.folder, "go").exists():
            time.sleep(_POLL_S)

    def _open(self, source: str, **more: Any) -> DistributedDataLoader[dict[str, Any]]:
        options = {"decode": None, "last_batch": "partial", "with_ids": True, "memory_limit": "12MiB", "threads": 1}
        return DistributedDataLoader(source, global_batch_size=self._job.global_batch, **{**options, **more})

    def _use(self, batch: Mapping[str, Any], **more: Any) -> None:
        """Check the content of a batch, tell of it, and take a while."""
        ids = batch["__id__"].tolist()
        right = {i: digest_of(payload_of(i, self._job.sample_bytes)) for i in ids}
        wrong = sum(digest_of(value) != right[i] for i, value in zip(ids, batch["bin"], strict=True))
        self._log.tell(kind="batch", wrong=wrong, **more)
        time.sleep(self._job.pace_s)

    def _train(self) -> int:
        job = self._job
        world = open_world(device="cpu", timeout_s=job.meet_timeout_s)
        self._reach("world")
        width = _SAVE_WIDTH if job.saves_much else 64
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, width), nn.Linear(width, 1))

        def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
            self._use(batch)
            rows = len(batch["__id__"])
            return model(torch.ones(rows, 1)).square().sum(), rows

        def measure(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
            self._reach("evaluation")
            time.sleep(job.pace_s)
            return {"rows": (torch.tensor(float(len(batch["__id__"]))), torch.tensor(1.0))}

        config = TrainerConfig(
            epochs=job.epochs,
            output_dir=str(Path(job.folder, "run")),
            stall_timeout_s=job.stall_timeout_s,
            precision=PrecisionConfig(dtype="fp32"),
            parallel=ParallelConfig(zero=job.zero),
            checkpoint=CheckpointConfig(every_steps=job.save_every),
            evaluate=EvaluateConfig(every=10 if job.evaluates else None),
            report=ReportConfig(quiet=True),
        )
        with self._open(job.source, audit_dir=Path(job.folder, "audit")) as loader:
            self._reach("loader")
            evaluation = Evaluation(batches=self._open(job.source), metrics=measure) if job.evaluates else None
            with DistributedTrainer(
                model,
                lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
                loader,
                config,
                loss=loss,
                evaluation=evaluation,
                world=world,
            ) as trainer:
                summary = trainer.train()
        self._reach("trained")
        close_world()
        return EXIT_STALLED if summary.stopped_by_others else 0

    def _read(self) -> int:
        """Read without a trainer. Each batch's state is kept, so that a resume begins where all ranks arrived."""
        job = self._job
        dist.init_process_group("gloo")
        self._reach("world")
        drops: dict[str, Any] = {"keep": keep} if job.drops else {}
        with self._open(job.source, audit_dir=Path(job.folder, "audit"), **drops) as loader:
            if job.state is not None:
                loader.load_state_dict(job.state)
            while loader.epoch < job.epochs:
                for batch in loader:
                    self._use(batch, state=loader.state_dict())
                    if job.meets:
                        dist.all_reduce(torch.ones(1))
        self._reach("trained")
        dist.barrier()
        dist.destroy_process_group()
        return 0


def main() -> int:
    path = Path(*take_arguments("JOB.json", "python -m devtools faults"))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    job = HostJob.from_json(path.read_text())
    with suppress(KeyboardInterrupt):
        return HostRank(job, int(os.environ["RANK"])).run()
    return 130


if __name__ == "__main__":
    sys.exit(main())
