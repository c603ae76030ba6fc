"""Compare the loss and the bytes of learners that train apart with those of all-reduce, on the GPT recipe.

python -m devtools diloco [RESULT.json] [--steps 300] [--every 50] [--cases allreduce,diloco,...]

Each case is a run of two ranks on the same global batches, so at the same number of tokens; the loss is that of the
recipe's evaluation after the last step. Cases that RESULT.json has already, for these steps, are not run again.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .arguments import make_parser

_RANKS = 2
CASES: dict[str, dict[str, Any] | None] = {
    "allreduce": None,
    "diloco": {},
    "low momentum": {"momentum": 0.5},
    "diloco, int8": {"codec": "int8"},
    "streaming": {"fragments": 5, "overlap": 2, "alpha": 0.5, "codec": "bf16"},
    "average": {"rate": 1.0, "momentum": 0.0},
}
_WARM = "warm "
"""Prefix of cases that begin with the first half of the run by all-reduce, as DiLoCo's authors begin."""


def run_case(name: str, folder: Path, *, steps: int, every: int) -> dict[str, Any]:
    """Train one case; returns its last loss, the bytes that rank 0 sent, and seconds."""
    given = CASES[name.removeprefix(_WARM)]
    options = {"zero": 0, "blocks": "none"}
    if given is not None:
        options |= {"mode": "diloco"} | {f"diloco.{key}": one for key, one in ({"every": every} | given).items()}
    output = folder / name.replace(", ", "-").replace(" ", "-")
    if name.startswith(_WARM):
        half = f"checkpoints/step-{steps // 2}"
        if not (folder / "allreduce" / half).exists():
            sys.exit(f"{name!r} begins with {half} of the case allreduce; run that too, in the same --folder")
        shutil.copytree(folder / "allreduce" / half, output / half)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"),
        *("-m", "penstock.trainer", "gpt", f"--trainer.steps={steps}", f"--trainer.output-dir={output}"),
        *(f"--trainer.parallel.{key}={one}" for key, one in options.items()),
        *(f"--trainer.checkpoint.every-steps={steps // 2}", "--trainer.checkpoint.keep-best=0"),
        f"--trainer.schedule.warmup-steps={max(1, steps // 10)}",
        *("--trainer.report.quiet=true", "--trainer.report.every=10", f"--trainer.evaluate.every={steps}"),
    ]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=folder)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    by_kind = {line["kind"]: line for line in lines}
    trained = [line for line in lines if line["kind"] == "train"]
    return {
        "options": {} if given is None else {"every": every, **given},
        "loss": by_kind["evaluate"]["loss"],
        "wire_bytes": by_kind["end"]["wire_bytes"],
        "outer_bytes": trained[-1].get("outer_bytes", 0),
        "waited_s": sum(line.get("outer_wait_s", 0.0) for line in trained),
        "seconds": by_kind["end"]["seconds"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    cases = [one.replace(", ", "+") for one in (*CASES, *(_WARM + one for one in CASES if one != "allreduce"))]
    parser.add_argument("--cases", default=",".join(cases))
    parser.add_argument("--folder", type=Path, help="where data and runs are kept; by default they are deleted")
    arguments = parser.parse_args()
    names = [one.replace("+", ", ") for one in arguments.cases.split(",")]
    found: dict[str, Any] = {"steps": arguments.steps, "every": arguments.every, "cases": {}}
    if arguments.result is not None and arguments.result.exists():
        kept = json.loads(arguments.result.read_text())
        if (kept["steps"], kept["every"]) == (arguments.steps, arguments.every):
            found = kept
    found |= {
        "command": "python -m devtools diloco benchmarks/results/diloco.json",
        "ranks": _RANKS,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if arguments.folder is None else arguments.folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name not in found["cases"]:
                found["cases"][name] = run_case(name, folder, steps=arguments.steps, every=arguments.every)
            base, case = found["cases"].get("allreduce"), found["cases"][name]
            if base is not None:
                case["loss_ratio"] = case["loss"] / base["loss"]
                case["bytes_ratio"] = case["wire_bytes"] / base["wire_bytes"]
            print(name, json.dumps(case), flush=True)
            if arguments.result is not None:
                arguments.result.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
