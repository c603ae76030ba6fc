"""Train a small GPT on two mixed, packed sources of text; go on with other ranks and another mixture; audit it all.

    python examples/mixed_packed_text.py                   2 ranks, then 1, on the Python library's own text
    python examples/mixed_packed_text.py --ranks 4 8       the same with 4, then 8

The first run mixes code and prose 7 to 3; short prose is left out. The second one begins where the checkpoint of the
first says, on other ranks: it takes both alike, and comments besides. Each source goes on where it was, and the audit
counts every document once in each epoch of its source.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from packed_text import EOS, SEQ_LEN, SmallGPT, encode
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from penstock import DistributedDataLoader, Mixture, Packing, Source, audit
from penstock.loader import Keep, MixtureChangedWarning


def main() -> None:
    options = parse_options()
    if "RANK" in os.environ:
        train(Path(options.folder), options.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        for world_size in options.ranks:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
            own = [__file__, "--folder", folder, "--steps", str(options.steps)]
            subprocess.run([*launch, *own], env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)
        report = audit(Path(folder) / "audit")
        assert report.mixture is not None
        for source in report.mixture.sources:
            print(f"{source.name}: {source.delivered:,} documents delivered, {source.dropped:,} left out")
        print("the audit is exact" if report.is_exact else f"the audit found {report}")
        sys.exit(not report.is_exact)


# -- training, on each rank ------------------------------------------------------------------------------------------


def train(folder: Path, steps: int) -> None:
    """Train for some steps from the checkpoint in the folder, if there is one, and leave one behind."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SmallGPT()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    checkpoint = folder / "checkpoint.pt"
    saved = torch.load(checkpoint) if checkpoint.exists() else None
    dist.barrier()  # all have looked
    with DistributedDataLoader(
        mix(folder, is_resumed=saved is not None),
        global_batch_size=24,
        packing=Packing(seq_len=SEQ_LEN, field="text", tokenizer=encode, eos=EOS),
        with_ids=True,
        audit_dir=folder / "audit",
    ) as loader:
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            with warnings.catch_warnings(record=True, action="always", category=MixtureChangedWarning) as changes:
                loader.load_state_dict(saved["loader"])
            say("; ".join(str(change.message) for change in changes))
        for batch in islice(loader, steps):
            scores = wrapped(batch["tokens"], batch["position_ids"], batch["document_ids"])
            counts = batch["loss_mask"][:, 1:]
            loss = F.cross_entropy(scores[:, :-1][counts], batch["tokens"][:, 1:][counts])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        say(f"world size {dist.get_world_size()}, {steps} steps more: loss {loss.item():.3f}")
        for name, source in loader.metrics().sources.items():
            full = f"{source.packing_efficiency:.0%} of their tokens are not padding"
            say(f"  {name}: {source.samples:,} sequences since the run began, {source.epochs:.2f} epochs; {full}")
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(state, checkpoint)
        dist.barrier()
    dist.destroy_process_group()


def mix(folder: Path, *, is_resumed: bool) -> Mixture:
    """The mixture of the first run, or of the second."""
    long = Keep(["text"], lambda columns: [len(text) >= 80 for text in columns["text"]])
    sources = {
        "code": Source(folder / "code", weight=1 if is_resumed else 7),
        "prose": Source(folder / "prose", weight=1 if is_resumed else 3, keep=long),
    }
    if is_resumed:
        sources["comments"] = Source(folder / "comments", weight=1)
    return Mixture(sources, stop="never")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


# -- data ------------------------------------------------------------------------------------------------------------


def write_sources(folder: Path) -> None:
    """Documents of some modules of the standard library, as rows of parquet files, a folder a source."""
    modules = list(islice(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), 40))
    for name, read in {"code": read_code, "prose": read_prose, "comments": read_comments}.items():
        (folder / name).mkdir()
        documents = [text for path in modules for text in read(path.read_text("utf-8", "replace"))]
        pq.write_table(pa.table({"text": documents}), folder / name / "0.parquet", row_group_size=64)


def read_code(module: str) -> Iterator[str]:
    yield from filter(None, module.split("\n\n\n"))


def read_prose(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


def read_comments(module: str) -> Iterator[str]:
    yield from re.findall(r"(?:^ *# .+\n)+", module, re.MULTILINE)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each of the two runs")
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 1), help="of the two runs; divisors of 24")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the ranks
    return parser.parse_args()


if __name__ == "__main__":
    main()
