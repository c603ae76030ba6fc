"""``penstock plan``: predict batches, reads and memory on any number of ranks, without reading data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from ..loader.errors import ConfigError, PartitionError
from ..loader.formats.shard import CHUNK_BYTES
from ..loader.order.costs.forecast import CostForecast
from ..loader.order.forecast import Forecast, forecast
from ..loader.order.selecting import Subset
from ..storage.errors import PenstockError
from .common import OptionalNumber, in_option_words, parse, print_json
from .plan_costs import costs_of_run, open_named_costs, refuse_made_up, report_costs
from .plan_data import Chunks, list_chunks, made_up, order_for
from .plan_simulate import SimulationArguments, refuse_unused, run_simulation
from .screen import console, fact_table, format_bytes, format_count, print_columns, wrapped


@dataclass(frozen=True, kw_only=True)
class PlanArguments(SimulationArguments):
    """Predict batches, skew, reads and memory of a run for one or several world sizes, without reading data.

    The data set may be an existing one, or a hypothetical one given by --samples, --shards and --sample-bytes.

    example:  penstock plan s3://bucket/train/ --world-size 8 64 1024 --batch-size 32

    example:  penstock plan --samples 1e9 --shards 100000 --sample-bytes 110000 --world-size 1024

    With --simulate it plays the first steps on machines that are given by the options below it, and says how long ranks
    will wait for data, what the store must answer and what bounds the job.

    example:  penstock plan --samples 1e9 --bytes 1PB --world-size 8 512 4096 --simulate --store-requests-per-s 55000
    """

    last_batch: Literal["drop", "pad", "partial"] = "drop"
    """What happens to the samples that do not fill a global batch."""

    cost: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Index of costs, as of `penstock index --cost`: show how uneven ranks are by it, and how much is padding."""

    batch_tokens: OptionalNumber = None
    """With --cost, show batches under a budget of so many padded tokens a rank, with buckets."""


def run(arguments: Sequence[str]) -> int:
    given = parse(PlanArguments, "plan", arguments)
    given.refuse_no_samples()
    if given.simulate:
        if given.cost is not None or given.batch_tokens is not None or given.last_batch != "drop":
            raise ConfigError(
                "--simulate is of an epoch's first steps, of equal samples; leave out --cost, "
                "--batch-tokens and --last-batch"
            )
        return run_simulation(given)
    refuse_unused(given)
    name, chunks = ("hypothetical", made_up(given).listed()) if given.samples is not None else list_chunks(given)
    costs = None
    if given.cost is not None:
        refuse_made_up(given.share is not None or given.samples is not None)
        costs = open_named_costs(given, given.cost)
    elif given.batch_tokens is not None:
        raise ConfigError("--batch-tokens without --cost; give the index of tokens too")
    if given.share is not None:
        chunks = chunks.part(Subset.share(*given.share))
    columns = [_column(given, chunks, world_size) for world_size in given.world_size]
    forecasts = [each for each in columns if isinstance(each, Forecast)]
    if not forecasts and (first := next((each for each in columns if isinstance(each, _Refused)), None)):
        raise first.error
    forecasts_of: dict[int, CostForecast | str] = {}
    if costs is not None:
        shown = partial(costs_of_run, chunks.samples, costs, shuffle=given.shuffle, batch_tokens=given.batch_tokens)
        forecasts_of = {each.world_size: shown(each) for each in forecasts}
    if given.json:
        print_json([_plain(each, forecasts_of) for each in columns])
        return 0
    _report(given, name, columns, forecasts)
    if forecasts_of:
        report_costs(given.cost or "", list(forecasts_of.values()))
    return 0


def _plain(each: Forecast | _Refused, forecasts_of: dict[int, CostForecast | str]) -> dict[str, Any]:
    if not isinstance(each, Forecast):
        return each.to_dict()
    found = forecasts_of.get(each.world_size)
    return dataclasses.asdict(each) | (
        {} if found is None else {"costs": found.to_dict() if isinstance(found, CostForecast) else {"error": found}}
    )


@dataclass(frozen=True, slots=True)
class _Refused:
    """A number of ranks for which there can be no run, and why."""

    world_size: int
    error: PenstockError

    def to_dict(self) -> dict[str, Any]:
        return {"world_size": self.world_size, "error": in_option_words(str(self.error))}


def _column(given: PlanArguments, chunks: Chunks, world_size: int) -> Forecast | _Refused:
    try:
        return _forecast(given, chunks, world_size)
    except (ConfigError, PartitionError) as exc:
        return _Refused(world_size, exc)


def _forecast(given: PlanArguments, chunks: Chunks, world_size: int) -> Forecast:
    order = order_for(given, chunks.samples, chunks.memory, world_size)
    return forecast(
        chunks.samples,
        chunk_bytes=chunks.bytes,
        chunk_memory=chunks.memory,
        shards=chunks.shards,
        order=order,
        world_size=world_size,
        global_batch_size=given.samples_of_step(world_size),
        last_batch=given.last_batch,
    )


_LAST = {"drop": "left out of an epoch", "pad": "repeated to fill up an epoch", "partial": "in the last global batch"}


def _last_samples(last_batch: str, f: Forecast) -> str:
    """Describe what ``--last-batch`` does to the samples that do not fill a global batch."""
    if last_batch == "drop":
        return f"{f.samples_left_out:,}"
    if last_batch == "pad":
        return f"{-f.samples % f.global_batch_size:,}"
    return f"{f.samples % f.global_batch_size or f.global_batch_size:,}"


def _rows(last_batch: str) -> tuple[tuple[str, Callable[[Forecast], str]], ...]:
    return (
        ("global batch", lambda f: f"{f.global_batch_size:,}"),
        ("batches per rank", lambda f: f"{f.batches_per_rank:,}"),
        (f"samples {_LAST[last_batch]}", lambda f: _last_samples(last_batch, f)),
        ("lanes × window", lambda f: f"{f.lanes:,} × {f.window:,}"),
        ("skew of a batch, samples", lambda f: f"{f.batch_skew}"),
        ("skew of an epoch, samples", lambda f: f"{f.skew}"),
        ("read amplification", lambda f: f"{f.read_amplification:.2f}"),
        ("extra reads at lane cuts", lambda f: f"{f.cut_chunks:,} ({f.cut_chunks / f.chunks:.1%})"),
        ("open windows per rank", lambda f: f"{f.open_windows:,}"),
        ("memory of open windows per rank", lambda f: format_bytes(f.window_bytes)),
        ("read before the first batch", lambda f: f"≤ {format_bytes(f.first_batch_bytes)}"),
        ("unit of the shuffle", lambda f: format_count(f.piece, "row") if f.piece else "chunk"),
        ("spread of classes if sorted", lambda f: f"× {f.mixing.classes:.1f}" if f.mixing else "-"),
        ("neighbours that meet", lambda f: f"× {f.mixing.neighbours:.1f}" if f.mixing else "-"),
        ("mixing", lambda f: f.mixing.verdict if f.mixing else "-"),
    )


def _report(
    given: PlanArguments, name: str, columns: Sequence[Forecast | _Refused], forecasts: Sequence[Forecast]
) -> None:
    screen = console()
    first = forecasts[0]
    facts = fact_table()
    facts.add_row("data set", name)
    facts.add_row("samples", f"{first.samples:,}")
    shards, chunks = format_count(first.shards, "shard"), format_count(first.chunks, "chunk")
    facts.add_row("bytes", f"{format_bytes(first.bytes)} in {shards}, read in {chunks}")
    facts.add_row("last batch", f"--last-batch {given.last_batch}: {_LAST_WORDS[given.last_batch]}")
    screen.print(facts)
    screen.print()
    rows = _rows(given.last_batch)
    cells = [
        [f"{each.world_size:,}", *(show(each) if isinstance(each, Forecast) else "–" for _, show in rows)]
        for each in columns
    ]
    print_columns(screen, ["ranks", *(label for label, _ in rows)], cells)
    notes = [
        f"{each.world_size:,} {'rank' if each.world_size == 1 else 'ranks'}: {in_option_words(str(each.error))}"
        for each in columns
        if isinstance(each, _Refused)
    ]
    for note in notes + _warnings(forecasts):
        screen.print()
        for line in wrapped(note, screen.width):
            screen.print(line)


_PACK = "penstock pack SOURCE TARGET"
_SMALL_BYTES = 64 << 20  # as much as any rank reads and holds without notice
_LAST_WORDS = {
    "drop": "samples that do not fill a global batch are left out of the epoch; others are in it the next time",
    "pad": "the last global batch is filled up with repeated samples, marked in __valid__",
    "partial": "the last global batch is smaller",
}


def _warnings(forecasts: Sequence[Forecast]) -> list[str]:
    """In words, what to do about a data set of too few chunks for the lanes, or that mixes badly."""
    few = [each for each in forecasts if each.chunks < each.lanes and each.world_size > 1]
    cut, held = [each for each in few if not each.piece], [each for each in few if each.piece]
    lopsided = [each for each in forecasts if each.mixing is not None and each.mixing.verdict == "poor"]
    return [*_cut_chunks(cut), *_held_chunks(held), *_lopsided(lopsided)]


def _ranks(forecasts: Sequence[Forecast]) -> str:
    shown = [f"{each.world_size:,}" for each in forecasts]
    return f"{', '.join(shown)} {'rank' if shown == ['1'] else 'ranks'}"


def _few_chunks(worst: Forecast) -> str:
    return "The data set is one chunk" if worst.chunks == 1 else f"The data set has only {worst.chunks:,} chunks"


def _cut_chunks(few: Sequence[Forecast]) -> Iterator[str]:
    if few:
        worst = max(few, key=lambda each: each.lanes)
        times = min(1 + worst.cut_chunks / worst.chunks, worst.world_size)
        share = worst.bytes / (4 * worst.lanes)
        smaller = f" --shard-mib {share / (1 << 20):.2g}" if share < CHUNK_BYTES else ""
        yield (
            f"{_few_chunks(worst)} for up to {worst.lanes:,} lanes: on {_ranks(few)} several ranks read parts of the "
            f"same chunk, each chunk up to {times:.1f} times an epoch. "
            + _cure(worst, f"Give fewer lanes with --lanes, or pack it again into more chunks: `{_PACK}{smaller}`.")
        )


def _held_chunks(few: Sequence[Forecast]) -> Iterator[str]:
    if few:
        worst = max(few, key=lambda each: each.read_amplification)
        held = "it" if worst.chunks == 1 else "every chunk that has rows of its share"
        yield (
            f"{_few_chunks(worst)}, so its rows are shuffled one by one: on {_ranks(few)} each rank reads and holds "
            f"{held}, and a chunk is read {worst.read_amplification:.1f} times an epoch. "
            + _cure(worst, f"Pack it again into more chunks: `{_PACK}`.")
        )


def _cure(worst: Forecast, cure: str) -> str:
    """The cure for chunks that several ranks read; a small data set needs none."""
    if worst.bytes <= _SMALL_BYTES:
        return f"At {format_bytes(worst.bytes)} that costs little."
    return cure


def _lopsided(forecasts: Sequence[Forecast]) -> Iterator[str]:
    if forecasts:
        yield (
            f"On {_ranks(forecasts)} a batch comes from few places of the data set. If it is sorted (by class, source "
            "or date), batches will be lopsided: raise --window, or pack the data set anew in random order."
        )
