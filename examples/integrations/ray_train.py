"""Ray Train: the loader in each worker, its position in Ray's checkpoints, resumed on another number of workers.

    python examples/integrations/ray_train.py --ranks 2 --kill-at 13   both workers are killed at step 13
    python examples/integrations/ray_train.py                          resumes on one worker

The loader is made in the training function, where Ray has joined the workers in torch.distributed. It needs neither Ray
Data nor ``prepare_data_loader``, which fetches a batch ahead on GPUs that no checkpoint would know of.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from common import EPOCHS, SAVE_EVERY, Account, Line, make_rows, open_rows, parse_options, report
from ray import train
from ray.train.torch import TorchTrainer, prepare_model


def train_on_rows(config: dict[str, Any]) -> None:
    """What each worker runs."""
    folder = Path(config["folder"])
    rows = open_rows(folder)
    account = Account(folder, rows.rank, config["kill_at"])
    model = prepare_model(Line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "model.pt", weights_only=True)
            torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
            getattr(model, "module", model).load_state_dict(state)
            told = json.loads((Path(saved) / "loader.json").read_text())
        rows.load_state_dict(told["loader"])
        step = told["step"]

    while rows.epoch < EPOCHS:
        for batch in rows:
            account.note(step, batch["__id__"])
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                with tempfile.TemporaryDirectory() as made:
                    saved = None
                    if rows.rank == 0:
                        torch.save(model.state_dict(), Path(made) / "model.pt")
                        (Path(made) / "loader.json").write_text(json.dumps({"loader": rows.state_dict(), "step": step}))
                        saved = train.Checkpoint.from_directory(made)
                    train.report({"step": step}, checkpoint=saved)


def main() -> None:
    options = parse_options(__doc__)
    folder = options.folder.absolute()
    make_rows(folder)
    ray.init(num_cpus=options.ranks + 1, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train_on_rows,
        train_loop_config={"folder": str(folder), "kill_at": options.kill_at},
        scaling_config=train.ScalingConfig(num_workers=options.ranks),
        run_config=train.RunConfig(name="run", storage_path=str(folder / "ray")),
    )
    trainer.fit()
    if options.ranks == 1:
        report(folder)


if __name__ == "__main__":
    main()
