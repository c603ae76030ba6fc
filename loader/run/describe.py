"""The pipeline of a loader in words: one line a stage, with its settings, and why the loader chose them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..order.costs.buckets import BucketedOrder
from ..pipeline.tuning import MemoryLimitWarning, PipelineOptions
from ..sampler.mixture import MixtureSchedule

if TYPE_CHECKING:
    from ..sources.sources import OpenSource
    from .run import Run

_WIDTH = 11  # of the stages' names
_MOST_SOURCES, _MOST_NAMES = 5, 6
_TUNED = "tuned while it runs"


def describe(run: Run) -> str:
    """Describe the stages from the sources to the device, a line each. Reads nothing; shows a loaded state, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryLimitWarning)
        options = run.tune()
    stages = [
        *_describe_sources(run),
        ("order", _describe_order(run)),
        ("read", _describe_reading(run, options)),
        ("open", _describe_opening(run)),
        *_describe_work(run, options),
        ("batch", _describe_batches(run)),
        ("queue", f"up to {_bytes(options.batch_budget_bytes)} of batches made ahead"),
        ("place", _describe_place(run)),
        ("device", _describe_device(run)),
    ]
    return "\n".join(f"{name:<{_WIDTH}}{text}" for name, text in stages)


def _describe_sources(run: Run) -> Iterator[tuple[str, str]]:
    if not run.sources.is_mixed:
        yield "source", f"{run.sources.manifest.url}: {_describe_data(run.sources[0])}"
        return
    weights = _weights_now(run)
    total = sum(weights)
    for source, weight in list(zip(run.sources, weights, strict=True))[:_MOST_SOURCES]:
        yield "source", f"{source.name} ({weight / total:.1%} of samples): {_describe_data(source)}"
    if len(run.sources) > _MOST_SOURCES:
        yield "", f"and {len(run.sources) - _MOST_SOURCES:,} other sources"


def _weights_now(run: Run) -> Sequence[float]:
    """Find the weights of a mixture's sources for the next batch."""
    schedule = run.sampler.schedule
    assert isinstance(schedule, MixtureSchedule)
    _, here = schedule.cursor_at(*run.sampler.upcoming)
    changes = schedule.plan.changes
    return next(change.weights for change in reversed(changes) if change.position <= here.position)


def _describe_data(source: OpenSource) -> str:
    manifest = source.manifest
    selected = "" if source.selection is None else f"{source.num_samples:,} of "
    return (
        f"{selected}{_count(manifest.num_samples, 'sample')} in {_count(manifest.num_chunks, 'chunk')} of "
        f"{_count(len(manifest.shards), 'shard')}, {_bytes(int(manifest.lengths.sum()))} of {manifest.format}"
    )


def _describe_order(run: Run) -> str:
    config, order = run.config, run.sampler.order
    if not order.shuffle and order.lanes == 1:
        return "as stored (shuffle=False), in one lane"
    how = f"shuffled by seed {order.seed}" if order.shuffle else "as stored (shuffle=False)"
    why = "'auto': 4 a rank, at least 16" if config.lanes == "auto" else "as given"
    text = f"{how}, in {order.lanes} lanes ({why})"
    if order.shuffle:
        windows = sorted({each.order.window for each in run.sampler.orders})
        pieces = sorted({each.order.piece for each in run.sampler.orders})
        of = "chunks" if pieces == [0] else "rows" if pieces == [1] else f"pieces of {_range(pieces)} rows (0: chunks)"
        why = "'auto'" if config.window == "auto" else "as given"
        text += f", windows of {_range(windows)} {of} ({why})"
    if isinstance(order, BucketedOrder):
        text += ", samples of about the same length together"
    return text


def _describe_reading(run: Run, options: PipelineOptions) -> str:
    config, tuning, sources = run.config, run.config.tuning, run.sources
    where = "local files" if sources.is_local else "the store"
    text = f"{options.fetch_threads} chunks at a time from {where} ({_why(tuning.fetch_threads, 'fetch_threads', run)})"
    text += f", {_bytes(options.read_ahead_bytes)} ahead ({_why(tuning.read_ahead_bytes, 'read_ahead_bytes', run)})"
    limit = "'auto'" if tuning.memory_bytes is None else "as given"
    text += f", within {_bytes(options.memory_limit_bytes)} of memory ({limit})"
    if not options.holds_windows:
        text += ", too little for the open windows: chunks are read several times"
    if config.cache_dir is not None:
        text += f", kept in {config.cache_dir}"
    return text


def _describe_opening(run: Run) -> str:
    fields = list(dict.fromkeys(name for source in run.sources for name in source.columns or source.fields))
    formats = " and ".join(sorted({source.manifest.format for source in run.sources}))
    are_mapped = all(source.chunks.is_mapped for source in run.sources)
    mapped = ", copied from mapped files when due" if are_mapped else ""
    return f"{formats}: {_names(fields)}{mapped}"


def _describe_work(run: Run, options: PipelineOptions) -> Iterator[tuple[str, str]]:
    config, sources = run.config, run.sources
    where = _describe_workers(run, options)
    if any(each.given.keep is not None for each in config.sources):
        yield "keep", "a function of samples as they are stored drops some before they are decoded"
    choices = [source.options.decode for source in sources]
    yield "decode", f"{_unlike(choices, _describe_decoding)}, on {where}"
    transforms = [source.options.transform for source in sources]
    if any(transform is not None for transform in transforms):
        drops = " (may drop samples)" if any(source.options.may_drop for source in sources) else ""
        yield "transform", f"{_unlike(transforms, _name)}{drops}, there too"
    packings = [source.packer.packing for source in sources if source.packer is not None]
    if packings:
        yield "pack", f"documents into sequences of {packings[0].seq_len:,} tokens, by {packings[0].method!r}"


def _describe_workers(run: Run, options: PipelineOptions) -> str:
    tuning = run.config.tuning
    if tuning.asked_processes:
        return _count(tuning.asked_processes, "worker process", "es")
    why = _why(tuning.decode_threads, "decode_threads", run)
    text = f"{_count(options.decode_threads, 'thread')} ({why})"
    if run.resources.images is not None:
        text += f", or images on {run.resources.images.pool.processes} processes once there are many"
    return text


def _describe_decoding(choice: Any) -> str:
    if choice is None:
        return "nothing, values stay as stored (decode=None)"
    if isinstance(choice, Mapping):
        return "; ".join(
            [*(f"{name} {_describe_decoder(decoder)}" for name, decoder in choice.items()), "others by type"]
        )
    return "by extension and type ('auto')"


def _describe_decoder(decoder: Any) -> str:
    return "as stored" if decoder is None else f"by {_name(decoder)}"


def _describe_batches(run: Run) -> str:
    config, share = run.config, run.share
    if share.budget is not None:
        text = f"about {_count(share.batch_size, 'sample')}, as many as {share.budget.tokens:,} tokens a rank hold"
    else:
        text = _count(share.batch_size, "sample")
        if share.world_size > 1:
            text += f" a rank, {share.global_batch_size:,} on all {share.world_size:,}"
    text += " by column" if config.collate is None else f" by {_name(config.collate)}"
    if share.costs is not None:
        text += ", cut so that ranks' parts cost the same"
    try:
        text += f"; {_count(run.sampler.steps_per_epoch, 'batch', 'es')} an epoch, last_batch={config.last_batch!r}"
    except TypeError:
        text += "; how many an epoch has, reading tells" if run.sampler.drops_samples else "; the epoch has no end"
    bad = {"stop": "", "skip": "; bad samples are skipped", "replace": "; bad samples are replaced"}
    return text + bad[config.on_error]


def _describe_place(run: Run) -> str:
    where = "threads of this process" if run.place.work is None else "a process of its own, beside this one"
    return f"{where} ({run.place.reason})"


def _describe_device(run: Run) -> str:
    if run.config.cuda is None:
        return "none: batches stay in host memory"
    return f"{run.config.cuda}, copied ahead of need through pinned buffers on a stream of its own"


def _why(given: object, name: str, run: Run) -> str:
    tuning = run.config.tuning
    chosen = "'auto'" if given is None else "as given"
    return chosen if name in tuning.kept else f"{chosen}, {_TUNED}"


def _unlike(values: Sequence[Any], show: Any) -> str:
    """Show the value that all sources share; where they differ, each once."""
    return " or ".join(dict.fromkeys("none" if value is None and show is _name else show(value) for value in values))


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _count(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"


def _bytes(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = min(len(units) - 1, int(np.log2(max(1.0, count)) // 10))
    value = count / 1024**power
    return f"{value:.0f} {units[power]}" if power == 0 or value >= 100 else f"{value:.3g} {units[power]}"
