"""A rank that torchrun starts: trains on its GPU in each of the layouts, and rank 0 prints the weights.

Arguments: an empty folder, and a list of layouts as JSON.
"""

from __future__ import annotations

import json
import sys

from spread_cases import make_trainer, whole_weights

from penstock.trainer import close_world, open_world


def main(folder: str, layouts: str) -> None:
    world = open_world(device="cuda")
    found = []
    for number, parallel in enumerate(json.loads(layouts)):
        with make_trainer(f"{folder}/{number}", world, 4, parallel) as trainer:
            trainer.train()
        found.append({name: one.tolist() for name, one in whole_weights(trainer.parallel.inner).items()})
    if world.is_first:
        print("FOUND" + json.dumps(found), flush=True)
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
