"""torchdata: the loader as the source of a graph of nodes, whose state holds the loader's.

torchrun --nproc-per-node=2 examples/integrations/torchdata_nodes.py --kill-at 13   killed at step 13
python examples/integrations/torchdata_nodes.py                                     resumes on one rank
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from common import EPOCHS, SAVE_EVERY, STEPS_PER_EPOCH, Account, Line, make_rows, open_rows, parse_options, report
from torch.nn.parallel import DistributedDataParallel
from torchdata.nodes import Loader, Mapper, Prefetcher

from penstock.loader.integrations import LoaderNode


def normalise(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] - 0.5}


def main() -> None:
    options = parse_options(__doc__)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    make_rows(options.folder)
    rows = open_rows(options.folder)
    account = Account(options.folder, rows.rank, options.kill_at)
    loader = Loader(Prefetcher(Mapper(LoaderNode(rows), normalise), prefetch_factor=4))

    line = Line()
    model = DistributedDataParallel(line) if dist.is_initialized() else line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = options.folder / "torchdata.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        line.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]

    while step < EPOCHS * STEPS_PER_EPOCH:
        for batch in loader:
            account.note(step, batch["__id__"])
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0 and rows.rank == 0:
                torch.save({"model": line.state_dict(), "loader": loader.state_dict(), "step": step}, checkpoint)
    if rows.world_size == 1:
        report(options.folder)


if __name__ == "__main__":
    main()
