"""torchtitan: its dataloader and config over penstock, saved by torch.distributed.checkpoint as torchtitan saves it.

    torchrun --nproc-per-node=2 examples/integrations/torchtitan_tokens.py --kill-at 13   killed at step 13
    python examples/integrations/torchtitan_tokens.py                                     resumes on one rank

In a configuration of torchtitan the config below is the ``dataloader`` of ``Trainer.Config``, and ``Trainer`` builds it
and puts it into its checkpoints. This script does the same with a model of one table. It ends after two epochs, on a
data-parallel degree other than it began with; torchtitan's own loader cannot change the degree.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import EPOCHS, GLOBAL_BATCH, ROWS, SAVE_EVERY, Account, parse_options, report

from penstock import pack
from penstock.loader.integrations import TorchtitanLoader

SEQ_LEN = 8


def make_tokens(folder: Path) -> None:
    """Sequence i is of the tokens i, i, ..., so that what was trained on can be told."""
    if not (folder / "tokens").exists():
        own = folder / f"tokens-of-{os.getpid()}"
        texts = ([i] * (SEQ_LEN + 1) for i in range(ROWS))
        pack(texts, str(own), format="tokens", seq_len=SEQ_LEN + 1, shard_bytes=1800, progress=False)
        try:
            own.rename(folder / "tokens")
        except OSError:
            shutil.rmtree(own)


def main() -> None:
    options = parse_options(__doc__)
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo")
    rank, degree = dist.get_rank(), dist.get_world_size()
    make_tokens(options.folder)

    config = TorchtitanLoader.Config(
        url=str(options.folder / "tokens"), dtype=None, infinite=False, epochs=EPOCHS, seed=3
    )
    loader = config.build(  # as torchtitan's Trainer does
        dp_world_size=degree, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=GLOBAL_BATCH // degree
    )
    model = torch.nn.Embedding(ROWS, ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    account = Account(options.folder, rank, options.kill_at)
    step = 0
    saved = sorted(options.folder.glob("step-*/.metadata"))
    if saved:
        step = int(saved[-1].parent.name.removeprefix("step-"))
        dcp.load({"model": model.state_dict(), "dataloader": loader}, checkpoint_id=saved[-1].parent)

    for inputs, labels in loader:
        account.note(step, inputs["input"][:, 0])
        loss = torch.nn.functional.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            folder = options.folder / f"step-{step:03d}"
            dcp.save({"model": model.state_dict(), "dataloader": loader}, checkpoint_id=folder)
    if degree == 1:
        report(options.folder)
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
