"""``penstock export``: the weights of a run as safetensors."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ..loader.errors import ConfigError
from ..loader.progress import show_progress
from ..trainer.errors import TrainerConfigError
from ..trainer.weights.export import Export, count_bytes, export_run
from ..trainer.weights.names import check_rules
from ..trainer.weights.run_folder import Step
from .common import Flag, console, fact_table, format_bytes, format_count, format_seconds, local_path, parse, print_json

_SHOWN = 10
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write the weights of a run as safetensors, which any framework reads.

    Checks the checkpoint first. The output folder appears when it is whole. Needs neither ranks nor the model, and
    memory for the largest file about twice.

    example:  penstock export runs/gpt --step best --output exported/gpt

    example:  penstock export s3://bucket/run-7 --output exported/run-7

    example:  penstock export runs/gpt --format hf --dtype bf16 --rename '^=>model.' --output exported/gpt-hf
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]
    """Output folder of a run, its folder of checkpoints, or one checkpoint; or the URL of one of the last two."""

    output: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """Folder to write, which must not exist or be empty."""

    step: Annotated[str, tyro.conf.arg(metavar="{best,latest,N}")] = "latest"
    """Which checkpoint: that of the best metric, the newest, or the one of step N."""

    weights: Annotated[Literal["model", "ema"], tyro.conf.arg(metavar="{model,ema}")] = "model"
    """model: the weights that were trained. ema: their moving average, which a run with ema.decay keeps."""

    format: Annotated[Literal["safetensors", "hf"], tyro.conf.arg(metavar="{safetensors,hf}")] = "safetensors"
    """safetensors: one file, model.safetensors. hf: the layout of Hugging Face, in files of limited size with an index,
    and with the config.json that lies in RUN, or else the model's, if it knows its own."""

    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, tyro.conf.arg(metavar="{fp32,bf16,fp16}", help_behavior_hint="")
    ] = None
    """Round floating point to this format; as saved if not given."""

    max_shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "5GB"
    """With --format hf, largest size of a file, as 500MB or 5GiB."""

    rename: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN=>TEXT", help_behavior_hint="")
    ] = ()
    """Rule for the names of tensors, a regular expression and what takes its place; repeatable, applied in turn."""

    overwrite: Flag = False
    """Replace an earlier export."""

    json: Flag = False
    """Print the result as JSON."""


def run(arguments: Sequence[str]) -> int:
    given = parse(ExportArguments, "export", arguments)
    if not given.output:
        raise ConfigError("--output is empty; give a folder to be made")
    output = local_path(given.output, "--output")
    step, limit = _read_step(given.step), _read_size(given.max_shard_size)
    check_rules("--rename", given.rename)
    if given.format != "hf" and given.max_shard_size != "5GB":
        raise ConfigError("--max-shard-size cuts files of --format hf; --format safetensors writes one")
    started = time.monotonic()
    with show_progress("exporting", count_bytes(given.run, step, given.weights), unit="B") as advance:
        result = export_run(
            given.run,
            output,
            step=step,
            weights=given.weights,
            format=given.format,
            dtype=given.dtype,
            max_shard_bytes=limit,
            rename=given.rename,
            overwrite=given.overwrite,
            advance=advance,
        )
    seconds = time.monotonic() - started
    if given.json:
        print_json(dataclasses.asdict(result) | {"bytes": result.bytes, "seconds": seconds})
    else:
        _report(result, seconds)
    return 0


def _read_step(text: str) -> Step:
    if text in ("best", "latest"):
        return "best" if text == "best" else "latest"
    if not re.fullmatch(r"\d{1,18}", text):
        raise ConfigError(f"--step {text} is none; give best, latest or a number")
    return int(text)


def _read_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    size = 0.0 if found is None else float(found[1]) * _UNITS.get(found[2].upper(), 0)
    if not 1 <= size < 1 << 63:
        raise TrainerConfigError(f"--max-shard-size {text} is no size; give one as 500MB or 5GiB")
    return int(size)


def _report(result: Export, seconds: float) -> None:
    table = fact_table()
    table.add_row("checkpoint", result.checkpoint)
    table.add_row("step", f"{result.step:,}")
    tensors, numbers = format_count(result.tensors, "tensor"), format_count(result.numbers, "value")
    table.add_row("weights", f"{tensors}, {numbers}")
    table.add_row("written", result.output)
    for name, size in list(result.files.items())[:_SHOWN]:
        table.add_row("", f"{name}  {format_bytes(size)}")
    if len(result.files) > _SHOWN:
        table.add_row("", f"... and {len(result.files) - _SHOWN:,} more")
    table.add_row("took", format_seconds(seconds))
    console().print(table)
