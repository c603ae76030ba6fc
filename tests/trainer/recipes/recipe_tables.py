"""The tables of a small recipe, and changes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[dict[str, Any]], None]


def tables() -> dict[str, Any]:
    recipes = "penstock.trainer.recipes.digits"
    return {
        "model": {"use": f"{recipes}:DigitsNet", "args": {"width": 4}},
        "optimizer": {"use": "torch.optim:SGD", "args": {"lr": 0.1}},
        "loss": {"use": f"{recipes}:cross_entropy"},
        "data": {"use": "penstock:DistributedDataLoader", "args": {"source": "train", "global_batch_size": 64}},
        "evaluation": {
            "use": f"{recipes}:measure",
            "data": {"use": "penstock:DistributedDataLoader", "args": {"source": "test", "batch_size": 60}},
        },
        "trainer": {"steps": 3, "precision": {"dtype": "fp32"}},
    }


def put(path: str, value: Any) -> Change:
    def change(into: dict[str, Any]) -> None:
        *parts, last = path.split(".")
        for part in parts:
            into = into.setdefault(part, {})
        into[last] = value

    return change
