"""A workload made ready: its data set, each peer's environment and copy of it, and a job for every contender."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ...loader.dataset.index import open_manifest
from ...loader.dataset.manifest import Manifest
from ...loader.limits import usable_cores
from ...storage.errors import PenstockError
from ..contenders import LIMIT, OURS, VARIANTS
from ..datasets import Case, make_case
from ..harness.config import BenchConfig
from ..harness.job import Job
from ..harness.layout import find_layout
from ..harness.prepare import check_delivery, check_ours, prepare_peer, settle_decoder
from ..harness.subprocesses import ended_processes, in_short
from ..peers.environments import clean
from .cells import FieldConfig

_PREPARED_AT_ONCE = 3


@dataclass
class Workload:
    """A workload that is ready to be measured: jobs on the local disk, and why some contenders have none."""

    case: Case
    folder: Path
    manifest: Manifest
    jobs: dict[str, Job] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def prepare_workload(case: Case, config: FieldConfig, data: Path, tell: Callable[[str], None]) -> Workload:
    """Make the data set, and each peer's environment and copy of it; a few peers at a time, as nothing is timed."""
    tell(f"{case.title}: generating the data set")
    folder = make_case(case, data, config.scale)
    manifest = open_manifest(str(folder))
    layout = find_layout(manifest, None, None)
    settings = BenchConfig(
        source=str(folder),
        against=config.against,
        batch_size=case.batch_size,
        decode=case.decode,
        peer_layout=case.peer_layout,
        conversions=str(data / "conversions"),
        environments=config.environments,
        timeout_s=config.timeout_s,
    )
    ours = Job(
        contender=OURS,
        url=str(folder),
        num_samples=manifest.num_samples,
        scratch="",
        batch_size=case.batch_size,
        decode=case.decode,
        workers=usable_cores(),
        epochs=None,
        seconds=config.seconds,
        fields=layout,
        source_format=manifest.format,
    )
    ours = settle_decoder(settings, manifest, layout, ours)
    work = Workload(case, folder, manifest, {OURS: ours, LIMIT: replace(ours, contender=LIMIT)})
    tell(f"{case.title}: checking that every sample is delivered")
    truth = check_ours(ours)

    def prepare(name: str) -> Job | str:
        try:
            say = partial(_say_of, tell, case)
            job = ours if config.workers is None else replace(ours, workers=config.workers)
            return prepare_peer(name, settings, manifest, job, truth, say, checked=data / "checked.json")
        except (PenstockError, OSError) as exc:
            return clean(in_short(str(exc)))

    with ThreadPoolExecutor(_PREPARED_AT_ONCE) as pool:
        try:
            prepared = list(pool.map(prepare, config.against))
        except BaseException:  # as by Ctrl-C: a conversion may take an hour
            with ended_processes():
                pool.shutdown(cancel_futures=True)
            raise
    for name, job in zip(config.against, prepared, strict=True):
        if isinstance(job, Job):
            work.jobs[name] = job
        else:
            work.refused[name] = job
    for variant, base in VARIANTS.items():
        if case.views and base in work.jobs:
            work.jobs[variant] = replace(work.jobs[base], contender=variant)
            tell(f"{case.title}: checking that {variant} delivers every sample")
            try:
                check_delivery(work.jobs[variant], truth, checked=data / "checked.json")
            except PenstockError as exc:
                del work.jobs[variant]
                work.refused[variant] = clean(in_short(str(exc)))
    return work


def _say_of(tell: Callable[[str], None], case: Case, text: str) -> None:
    tell(f"{case.title}: {text}")
