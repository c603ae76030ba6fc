"""Whole runs on each kind of device come to what one process on the CPU comes to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_run import train

from penstock.trainer import World

PROGRAM = Path(__file__).parent / "device_run.py"
LITTLE_MEMORY = PROGRAM.with_name("memory_run.py")
FP16 = {"dtype": "fp16", "init_scale": 64.0}  # no step is left out for an overflow
CASES: dict[str, dict[str, Any]] = {
    "plain": {"step": {"clip_norm": 1.0}, "ema": {"decay": 0.9}, "shares": "auto", "shares_every": 2},
    "probe": {"step": {"adaptive_batch": True, "accumulate": 2}},
    "fp16": {"precision": FP16, "step": {"on_nan": "skip"}},
    "compiled": {"compile": {"enabled": True}, "activation": {"every": 2}},
    "cuda graphs": {"compile": {"enabled": True, "cuda_graphs": True}, "step": {"clip_norm": 1.0}},
    "deterministic": {"deterministic": True, "ema": {"decay": 0.9}},
    "bf16 on the wire": {"compression": {"scheme": "bf16"}},
    "powersgd": {"compression": {"scheme": "powersgd", "rank": 4}},
    "local sgd": {"average_every": 1},
    "zero 1": {"parallel": {"zero": 1}, "step": {"accumulate": 2, "clip_norm": 1.0}},
    "zero 1, averaged": {"parallel": {"zero": 1}, "ema": {"decay": 0.9}},
    "zero 2, int8": {"parallel": {"zero": 2}, "compression": {"scheme": "int8"}},
    "zero 2, fp16": {"parallel": {"zero": 2}, "precision": FP16},
    "zero 3, bf16": {"parallel": {"zero": 3}, "precision": {"dtype": "bf16"}, "activation": {"every": 1}},
    "zero 3, compiled": {"parallel": {"zero": 3}, "compile": {"enabled": True}},
    "zero 3, offloaded": {"parallel": {"zero": 3, "cpu_offload": True}, "step": {"clip_norm": 1.0}},
}
ROUNDED = ("precision", "compression", "average_every")  # options with which weights come out otherwise
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "device"),
    [
        ("plain", "cpu"),
        ("zero 3, bf16", "cpu"),
        *(pytest.param(case, "cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]) for case in CASES),
    ],
)
def test_a_run_and_its_resume_come_to_the_weights_of_one_process_on_the_cpu(
    world: World, tmp_path: Path, case: str, device: str
) -> None:
    """Where there are two GPUs, two ranks of them; else one."""
    options = CASES[case]
    plain = {key: options[key] for key in ("step", "ema") if key in options}
    expected = train(world, str(tmp_path / "alone"), plain)
    ranks = 2 if device == "cpu" else min(2, torch.cuda.device_count())
    found = run(PROGRAM, device, str(tmp_path / "run"), json.dumps(options), ranks=ranks)
    assert found["device"] == device
    tolerance = 5e-2 if any(option in options for option in ROUNDED) else 1e-3
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    weights = torch.tensor(found["weights"])
    torch.testing.assert_close(weights, torch.tensor(expected["weights"]), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.slow
@NEEDS_CUDA
def test_the_largest_microbatch_that_fits_into_a_gpus_memory_is_found_and_trains_as_others_do(tmp_path: Path) -> None:
    little = 1 << 30
    step = {"adaptive_batch": True}
    found = run(LITTLE_MEMORY, str(little), str(tmp_path / "found"), json.dumps({"step": step}))
    assert 1 < found["rows"] < 32
    assert found["peak"] <= little
    lines = map(json.loads, (tmp_path / "found" / "metrics.jsonl").read_text().splitlines())
    notes = [line for line in lines if line["kind"] == "note"]
    assert any(f"microbatches of {found['rows']} rows fit, {found['rows'] + 1} do not" in one["note"] for one in notes)
    fixed = run(LITTLE_MEMORY, str(8 * little), str(tmp_path / "fixed"), json.dumps({"step": {"microbatch": 2}}))
    torch.testing.assert_close(torch.tensor(found["weights"]), torch.tensor(fixed["weights"]), rtol=1e-3, atol=1e-4)


def run(program: Path, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """What a program that torchrun starts prints after FOUND."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(program)]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(told.removeprefix("FOUND"))
    return found
