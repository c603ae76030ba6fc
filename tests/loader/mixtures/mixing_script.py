"""One rank that reads a mixture of two sources step by step with the others, and saves its state every few steps.

python mixing_script.py FOLDER RANK WORLD_SIZE BATCH WEIGHT_OF_A STEPS: begins where FOLDER/state.json says.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from penstock import DistributedDataLoader, Mixture, Source
from penstock.loader import MixtureChangedWarning


def main(folder: Path, rank: int, world_size: int, batch_size: int, weight: float, steps: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{world_size}", rank=rank, world_size=world_size
    )
    sources = {"a": Source(folder / "a", weight=weight), "b": Source(folder / "b")}
    mixture = Mixture(sources, stop="never")
    saved = folder / "state.json"
    with DistributedDataLoader(mixture, batch_size=batch_size, threads=1, audit_dir=folder / "audit") as loader:
        if saved.exists():
            warnings.simplefilter("ignore", MixtureChangedWarning)
            loader.load_state_dict(json.loads(saved.read_text()))
        for step, _ in zip(range(steps), loader, strict=False):
            dist.barrier()
            if rank == 0 and step % 5 == 4:
                (folder / "new.json").write_text(json.dumps(loader.state_dict()))
                (folder / "new.json").rename(saved)
            if step == 20:
                (folder / f"reached-{rank}").touch()
        dist.barrier()
        if rank == 0:
            (folder / "end.json").write_text(json.dumps(loader.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5]), int(sys.argv[6]))
