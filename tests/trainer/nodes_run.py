"""Run by torchrun on nodes that join and leave: slow steps until the file ``hurry`` exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tar_rows import square_x, training

from penstock.trainer import EXIT_STALLED, close_world, open_world


def main(folder: Path) -> int:
    def loss(model: Any, batch: Any) -> Any:
        if not (folder / "hurry").exists():
            time.sleep(0.1)
        return square_x(model, batch)

    world = open_world(device="cpu")
    with training(world, folder, loss=loss, epochs=8, checkpoint={"every_steps": 5}) as trainer:
        summary = trainer.train()
    close_world()
    return EXIT_STALLED if summary.stopped_by_others else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
