"""Runs of Hugging Face's Trainer, each told as a line of JSON: a program, as importing transformers takes seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from without_torchvision import hide

hide()
import torch  # noqa: E402
from made_rows import write_rows  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from penstock import DistributedDataLoader  # noqa: E402
from penstock.loader.integrations import TorchLoader, TransformersCallback  # noqa: E402

BATCH, STEPS, ACCUMULATED = 10, 12, 5  # an epoch of 12 batches is steps of 5, 5 and 2


class KilledError(Exception):
    """Ends training where a kill would."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(1, 1)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return {
            "loss": (self.dropout(self.line(batch["x"].float()[:, None])) - batch["y"].float()[:, None]).square().mean()
        }


class RowsTrainer(Trainer):
    """Trains on penstock's rows, and notes the ids of each batch."""

    def __init__(
        self, folder: Path, kill_at: int | None, view: Callable[[Any], Any], loader: dict[str, Any], **given: Any
    ) -> None:
        super().__init__(**given)
        options = {"batch_size": BATCH, "seed": 5, "with_ids": True, "rank": 0, "world_size": 1, **loader}
        self.rows: DistributedDataLoader[dict[str, Any]] = DistributedDataLoader(str(folder / "rows"), **options)
        self.kill_at, self.view = kill_at, view
        self.batches: list[list[int]] = []

    def get_train_dataloader(self) -> Any:
        return self.view(self.rows)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        options: dict[str, Any] = {"shuffle": False, "rank": 0, "world_size": 1}
        return self.view(DistributedDataLoader(self.rows.manifest, batch_size=40, **options))

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any) -> torch.Tensor:
        if self.state.global_step == self.kill_at:
            raise KilledError
        self.batches.append(inputs["__id__"].tolist())
        return super().training_step(model, inputs, *rest)


def train(
    folder: Path,
    *,
    kill_at: int | None = None,
    callback: bool = True,
    view: Callable[[Any], Any] = TorchLoader,
    loader: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """What a run that goes on from the folder's newest checkpoint did: its batches, weights, last epoch or error."""
    given: dict[str, Any] = {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": ACCUMULATED,
        "per_device_train_batch_size": BATCH,
        "save_steps": 2,
        "learning_rate": 0.1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "label_names": ["y"],
        **arguments,
    }
    callbacks: list[Any] = [TransformersCallback()] if callback else []
    saved = folder / "saved"
    trainer = RowsTrainer(
        folder,
        kill_at,
        view,
        loader or {},
        model=Model(),
        args=TrainingArguments(str(saved), **given),
        callbacks=callbacks,
    )
    told: dict[str, Any] = {}
    try:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(saved)) if saved.exists() else None)
    except KilledError:
        pass
    except (ValueError, AttributeError) as exc:
        told["error"] = f"{type(exc).__name__}: {exc}"
    trainer.rows.close()
    weights = [float(value.detach()) for value in trainer.model.parameters()]
    return {"batches": trainer.batches, "weights": weights, "epoch": trainer.state.epoch, **told}


def train_as_dataset(folder: Path) -> dict[str, Any]:
    """What the Trainer itself says to a loader as its ``train_dataset``."""
    arguments = TrainingArguments(str(folder / "saved"), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
    with DistributedDataLoader(str(folder / "rows"), batch_size=BATCH) as loader:
        try:
            Trainer(model=Model(), args=arguments, train_dataset=loader).train()
        except TypeError as exc:
            return {"batches": [], "error": f"TypeError: {exc}"}
    return {"batches": ["trained"]}


def evaluate(folder: Path) -> dict[str, Any]:
    """The Trainer's loss over all rows, twice, and the loss itself."""
    trainer = RowsTrainer(
        folder,
        None,
        TorchLoader,
        {},
        model=Model(),
        args=TrainingArguments(str(folder / "saved"), report_to=[], use_cpu=True, label_names=["y"]),
    )
    told = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    rows = list(trainer.rows)
    fields = {name: torch.cat([batch[name] for batch in rows]) for name in ("x", "y")}
    return {"told": told, "loss": float(trainer.model(**fields)["loss"])}


def evaluate_padded(folder: Path) -> dict[str, Any]:
    """The rows that ``compute_metrics`` gets in the midst of training, of batches that end in padding."""
    counts: list[list[int]] = []

    def count(prediction: Any) -> dict[str, float]:
        ids, valid = prediction.label_ids
        counts.append([len(ids), len(set(ids[valid].tolist())), int(valid.sum())])
        return {}

    options: dict[str, Any] = {"batch_size": 50, "last_batch": "pad", "shuffle": False, "with_ids": True}
    with DistributedDataLoader(str(folder / "rows"), rank=0, world_size=1, **options) as rows:

        class Evaluating(RowsTrainer):
            def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
                return self.eval_dataset

        arguments = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "label_names": ["__id__", "__valid__"]}
        trainer = Evaluating(
            folder,
            None,
            TorchLoader,
            {},
            model=Model(),
            args=TrainingArguments(str(folder / "saved"), report_to=[], disable_tqdm=True, use_cpu=True, **arguments),
            eval_dataset=TorchLoader(rows),
            compute_metrics=count,
            callbacks=[TransformersCallback()],
        )
        trainer.train()
    return {"counts": counts, "batches": trainer.batches}


def main(folder: Path) -> None:
    def fresh(name: str) -> Path:
        write_rows(folder / name / "rows")
        return folder / name

    def tell(case: str, told: dict[str, Any]) -> None:
        print(json.dumps({"case": case, **told}))

    tell("unbroken", train(fresh("unbroken")))
    for kill_at in (3, 5, 6):  # of three steps an epoch; saved at 2 (in mid-epoch), 4 (in mid-epoch), 6 (its end)
        resumed = fresh(f"resumed-{kill_at}")
        tell(f"killed at {kill_at}", train(resumed, kill_at=kill_at))
        tell(f"resumed at {kill_at}", train(resumed))
    tell("evaluated", evaluate(fresh("evaluated")))
    tell("evaluated with padding", evaluate_padded(fresh("padded")))
    tell("bare loader", train(fresh("bare"), view=lambda rows: rows))
    tell("as its data set", train_as_dataset(fresh("dataset")))

    killed = fresh("killed")
    train(killed, kill_at=3)
    tell("ignore_data_skip", train(killed, ignore_data_skip=True))
    tell("another global batch", train(killed, loader={"batch_size": 20}))
    tell("another seed", train(killed, loader={"seed": 6}))
    silent = fresh("silent")
    train(silent, kill_at=3, callback=False)
    tell("saved without the callback", train(silent))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
