"""A loader at work: its sources, its position, and the pipelines that deliver its batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...storage.observability.counts import fastest_response_s
from ..config.tuning import count_image_processes
from ..counters import Counters
from ..errors import ConfigError, WorkerError
from ..pipeline.assembler import Assembler, Equipment, Start
from ..pipeline.autotune import Tuner
from ..pipeline.device import DeviceFeeder
from ..pipeline.pipeline import Pipeline
from ..pipeline.tuning import PipelineOptions, tune
from ..ranks.detect import check_rank
from ..sampler.sampler import ignore
from ..sources.kinds import group_kinds, open_kinds
from ..sources.quarantine import Quarantine
from .assembly import Reading, make_assembler

if TYPE_CHECKING:
    from ...storage.observability.timeline import Timeline
    from ..config.loader_config import LoaderConfig
    from ..decoding.row_work import BatchOptions, RowWork
    from ..metrics import LoaderMetrics
    from ..order.plan import Share
    from ..pipeline.beside.process import LoaderProcess
    from ..pipeline.beside.remote import RemotePipeline
    from ..pipeline.beside.requests import Request
    from ..ranks.naming import Attempt
    from ..sampler.sampler import Sampler
    from ..sources.sources import Sources
    from .place import Place
    from .resources import Resources

logger = logging.getLogger(__name__)

_RECORDING = threading.Lock()


class Run:
    """A loader's sources, its place in their order, and the pipeline that is ahead of it.

    Only its newest pass may continue. Used by the training loop's thread only. Mutable state besides the sampler and
    the resources: how many passes have begun, where batches are made, and what tuning has found.
    """

    def __init__(
        self,
        config: LoaderConfig,
        sources: Sources,
        sampler: Sampler,
        resources: Resources,
        counters: Counters,
    ) -> None:
        self.config = config
        self.sources = sources
        self.sampler = sampler
        self.resources = resources
        self.counters = counters
        self.begun = 0
        self.reading = Reading(
            sources=sources,
            kinds=open_kinds(config, sources),
            quarantine=Quarantine(sources, config.errors.max_bad_chunks),
            counts=[Counters() for _ in sources],
            ledgers=None if sampler.schedule.unsized is None else sampler.schedule.unsized.ledgers,
            bad=[source.errors.bad for source in sources],
            is_logged=config.audit_dir is not None,
        )
        self.batch_options = self._choose_batch_options()
        self._tuner = Tuner(config.tuning)
        self._replacer = sources.apart().make_replacer()
        self.place = None if config.place == "threads" else self._choose_place()
        resources.others += [source.chunks for source in sources]
        if self.reading.ledgers is not None:
            resources.others.append(self.reading.ledgers)
        if self.place is None or self.place.work is None:
            self._choose_workers()
        else:
            self._choose_process(self.place.work)

    @property
    def share(self) -> Share:
        """This rank's part of global batches."""
        return self.sampler.share

    def check_rank(self) -> None:
        """Raise ConfigError where torch.distributed now reports another rank than the loader was made for."""
        is_given = self.config.rank is not None or self.config.mesh is not None
        check_rank(self.share.rank, self.share.world_size, is_given=is_given)

    def join(self, attempt: Attempt | None) -> None:
        """Begin the log, if there is one, and receive errors of other ranks; ``attempt`` names the loader for them."""
        config, manifest, share = self.config, self.sources.manifest, self.share
        selection = None if self.sources.is_mixed else self.sources[0].selection
        if attempt is not None and share.world_size > 1:
            from ..ranks.calls import Calls

            processes = share.world_size if config.mesh is None else config.mesh.size()
            taken = {} if selection is None else selection.to_dict()
            name = attempt.name(manifest.fingerprint, taken, shuffle=config.shuffle, processes=processes)
            self.resources.names = name, *attempt.names
            self.resources.calls = Calls(name, processes)
        if config.audit_dir is not None:
            from ..pipeline.delivery_log import DeliveryLog

            self.resources.log = DeliveryLog(
                config.audit_dir,
                manifest=manifest,
                rank=share.rank,
                world_size=share.world_size,
                selection=selection,
                may_drop=config.drops,
                is_packed=config.packs,
                bad=self.sources.bad,
                sources=self.sources.describe(),
            )
        if share.world_size > 1:
            self.resources.join_peers()

    # -- what is chosen once ------------------------------------------------------------------------------------------

    def _choose_batch_options(self) -> BatchOptions:
        """Choose the loader's options, with those of its sources; of several kinds, each has a transform of its own.

        Raises:
            ConfigError: a field of the data has a name that the loader gives, or is not there to be cut.
        """
        config, sources, kinds = self.config, self.sources, self.reading.kinds
        is_alone = len(kinds) == 1
        options = replace(
            config.batch_options,
            transform=kinds[0].transform if is_alone else None,
            may_drop=is_alone and kinds[0].may_drop,
            identify=sources.identify,
            avoided=sources.avoided_ids,
        )
        absent: frozenset[str] = frozenset()  # fields that are cut where they are read
        for source in sources:
            where = f"source {source.name!r}" if sources.is_mixed else source.manifest.url
            delivered = source.fields if source.packer is None else source.columns or source.fields
            options.refuse_taken_names(delivered, where)
            are_made = source.options.transform is not None or config.collate is not None
            if cut := config.group.cut_batches(source.fields, source.columns, are_made=are_made):
                absent |= cut.absent
                options = replace(options, finish=replace(cut, absent=absent))
        return options

    def _make_first_work(self) -> RowWork:
        """Make the work on rows of the first kind. Raises ConfigError where that cannot be called."""
        kind = self.reading.kinds[0]
        return replace(self.batch_options, transform=kind.transform, may_drop=kind.may_drop).work

    def _choose_workers(self) -> None:
        """Choose the processes that decode and transform: those asked for, or some for images if the cores suffice."""
        tuning, raw, work = self.config.tuning, self.config.raw, self._make_first_work()
        are_alike = len(group_kinds(self.sources)) == 1
        if tuning.asked_processes:
            from ..decoding.workers.pool import WorkerPool

            self.resources.workers = WorkerPool(work, self.sources[0].options.decode, tuning.asked_processes)
            return
        if not (are_alike and work.transform is None and raw == "bytes" and tuning.is_free):
            return
        if count := count_image_processes(tuning.cores):
            from ..decoding.workers.images import ImageProcesses

            self.resources.images = ImageProcesses(work, count)

    def _choose_place(self) -> Place:
        from .place import choose_place

        self._make_first_work()  # refused here as it is where threads do it
        return choose_place(self.config, self.sources)

    def _choose_process(self, work: bytes) -> None:
        from ..pipeline.beside.pinning import CudaLocks, PinnedSlots
        from ..pipeline.beside.process import LoaderProcess
        from .place import code_of

        cuda = self.config.cuda
        pinned = PinnedSlots(None if cuda is None else CudaLocks(cuda))
        counters = [self.counters, *self.reading.counts]
        self.resources.process = LoaderProcess(lambda: code_of(work), counters, pinned, self.reading.absorb)

    # -- passes -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a pass from the epoch's beginning, or from the state just loaded."""
        self.resources.check_open()
        if self.sampler.begin_pass():
            self.resources.stop_pipeline()  # it is ahead in an epoch that begins anew
        self.begun += 1

    def note_call(self, text: str, upcoming: tuple[int, int] | None = None) -> None:
        """Note a call that every rank must make alike; ``upcoming``: the position before it, if not that of now."""
        if self.resources.calls is not None:
            self.resources.calls.note(text, upcoming or self.sampler.upcoming, self.begun)

    def _note_move(self) -> None:
        if self.resources.calls is not None:
            self.resources.calls.note_move()

    def check_calls(self) -> None:
        """Raise ConfigError where another rank has called what this one should have called by now."""
        calls = self.resources.calls
        if calls is not None and calls.lacks_one:
            calls.check(self.sampler.upcoming, self.begun)

    # -- moves --------------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless a state that was just loaded is inside it."""
        self.resources.check_open()
        self._note_move()
        if self.sampler.set_epoch(epoch):
            self.resources.stop_pipeline()

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved. Raises StateMismatchError where that means nothing here."""
        loaded = self.sampler.check_state(state)
        self.resources.check_open()
        self.resources.stop_pipeline()
        self._note_move()
        if self.resources.log is not None:
            self.resources.log.record_load(loaded.epoch, loaded.consumed)
        self.sampler.load(loaded, self._record_rest)

    def skip(self, count: int) -> None:
        """Skip global batches without reading them."""
        self.resources.check_open()
        self.resources.stop_pipeline()
        self.note_call(f"skip_batches({count})")
        self._note_move()
        log = self.resources.log
        self.sampler.skip(count, ignore if log is None else log.record_skip, self._record_rest)

    def seek(self, epoch: int, batch: int) -> None:
        """Go to a batch of an epoch; what was read ahead is kept if that is the next one anyway."""
        self.resources.check_open()
        self._note_move()
        if self.sampler.seek(epoch, batch):
            self.resources.stop_pipeline()
        if self.resources.log is not None:
            self.resources.log.record_seek(*self.sampler.upcoming)

    def change_share(self, share: Share, call: str) -> None:
        """Cut global batches by ``share`` from the next one on, as all ranks do that make this ``call``."""
        self.resources.check_open()
        self.note_call(call)
        self.resources.stop_pipeline()
        self.sampler.change_share(share, self._record_rest)

    def set_weights(self, weights: Mapping[str, float], at: int | None) -> None:
        """Change the weights of a mixture's sources from the next batch, or from position ``at``, on."""
        self.resources.check_open()
        before = self.sampler.upcoming
        self.sampler.set_weights(weights, at)
        named = {name: float(weight) for name, weight in sorted(weights.items())}
        self.note_call(f"set_weights({named}{'' if at is None else f', at={int(at)}'})", before)
        self.resources.stop_pipeline()

    def _record_rest(self, epoch: int, start: int, stop: int) -> None:
        """Log the rest of an epoch that fills no batch now, which the batches before it do not show."""
        if self.resources.log is not None:
            self.resources.log.record_drop(epoch, start, stop)

    # -- pipelines ----------------------------------------------------------------------------------------------------

    def running(self) -> Pipeline | RemotePipeline | None:
        """Get the running pipeline, if there is one."""
        self.resources.check_open()
        pipeline = self.resources.pipeline
        if pipeline is not None and pipeline.is_stopped:  # an interrupt came before it was forgotten
            self.resources.stop_pipeline()
            pipeline = None
        return pipeline

    def pipeline(self) -> Pipeline | RemotePipeline:
        """Get the running pipeline, or start one at the position."""
        pipeline = self.running()
        if pipeline is None:
            try:
                pipeline = self._start_pipeline()
            finally:
                self.resources.close_if_closed()
        return pipeline  # another thread may have closed the loader meanwhile

    def _start_pipeline(self) -> Pipeline | RemotePipeline:
        if self.share.world_size > 1:
            self.resources.join_peers()
        process = self.resources.process
        if process is not None:
            try:
                return self._start_remote(process)
            except (ConfigError, WorkerError) as exc:
                if self.config.place == "process":
                    raise
                self._leave_process(exc)
        workers = self.resources.workers
        if workers is not None:
            workers.start()
        start = self.start(self.sampler.epoch, self.sampler.consumed)
        # Held before its threads start: an interrupt at any point leaves nothing that cannot be closed.
        pipeline = self.resources.pipeline = self.make_pipeline(start, self.tune())
        pipeline.start()
        return pipeline

    def _start_remote(self, process: LoaderProcess) -> RemotePipeline:
        from ..pipeline.beside.remote import RemotePipeline

        device = self.config.cuda
        pipeline = self.resources.pipeline = RemotePipeline(
            process,
            self._name_request(),
            self.reading.export(),
            options=self.tune(),
            counters=self.counters,
            feeder=None if device is None else DeviceFeeder(device),
        )
        pipeline.start()
        return pipeline

    def _name_request(self) -> Request:
        from ..pipeline.beside.requests import Request

        sampler, share = self.sampler, self.share
        return Request(
            fingerprint=self.sources.manifest.fingerprint,
            order=sampler.to_state().to_dict(),
            epoch=sampler.epoch,
            position=sampler.consumed,
            rank=share.rank,
            world_size=share.world_size,
            global_batch_size=share.global_batch_size,
            weights=share.weights,
            work="" if self.place is None else self.place.digest,
        )

    def _leave_process(self, cause: Exception) -> None:
        """Let threads do the work that nobody asked a process for, since it cannot."""
        from .place import Place

        logger.warning("the loader's threads do the work, because a process cannot: %s", cause)
        self.resources.stop_pipeline()
        process, self.resources.process = self.resources.process, None
        if process is not None:
            process.close()
        self.place = Place(f"'auto': a process could not be started: {cause}")
        self._choose_workers()

    def make_pipeline(
        self, start: Start, options: PipelineOptions, read_waits: Callable[[float], float] | None = None
    ) -> Pipeline:
        """Make a pipeline of threads; ``read_waits`` as ``Pipeline`` has it."""
        return Pipeline(
            source=self.sources.chunks,
            batch_options=self.batch_options,
            decoders=self.reading.kinds[0].decoders,
            options=options,
            counters=self.counters,
            make_assembler=self._make_assembler,
            start=start,
            read_waits=read_waits,
            workers=self.resources.workers,
            images=self.resources.images,
            replacer=self._replacer,
            tuner=self._tuner,
        )

    def _make_assembler(self, equipment: Equipment, start: Start) -> Assembler:
        return make_assembler(self.config, self.sampler, self.reading, equipment, start)

    def start(self, epoch: int, consumed: int) -> Start:
        """Make the start of a pipeline for a position that is the upcoming one, or an epoch's beginning."""
        cursors = self.sampler.cursors() if consumed else None
        return Start(order=self.sampler.order, share=self.share, epoch=epoch, position=consumed, cursors=cursors)

    def tune(self) -> PipelineOptions:
        """Choose the parallelism of a pipeline that starts now."""
        sources, tuning = self.sources, self.config.tuning
        others = []
        if sources.is_mixed:
            others = [(one.manifest, own.order) for one, own in zip(sources, self.sampler.orders, strict=True)]
        return tune(
            sources.manifest,
            self.sampler.order,
            world_size=self.share.world_size,
            memory_limit=tuning.memory_bytes,
            threads=tuning.first_decode_threads,
            is_local=sources.is_local,
            device=self.config.cuda,
            others=others,
            fetch_threads=tuning.fetch_threads,
            read_ahead=tuning.read_ahead_bytes,
            response_s=None if sources.is_mixed else fastest_response_s(sources),
        )

    # -- what others ask, from any thread -----------------------------------------------------------------------------

    def record_timeline(self, timeline: Timeline | None) -> None:
        """Add the spans of all stages to ``timeline`` from now on; None ends that. Raises ConfigError if one is on."""
        with _RECORDING:
            if timeline is not None and self.counters.timeline is not None:
                raise ConfigError("a trace of this loader is being recorded already; end that one first")
            before, self.counters.timeline = self.counters.timeline, timeline
            if self.resources.process is not None:
                spans = self.resources.process.trace(is_on=timeline is not None)
                if before is not None:
                    before.absorb(spans)

    def metrics(self) -> LoaderMetrics:
        """Measure the current numbers; of a mixture also the progress in each source."""
        from ..metrics import LoaderMetrics, MixtureMetrics, SourceProgress
        from ..sampler.mixture import MixtureSchedule

        metrics = LoaderMetrics.read(self.counters, self.resources.levels(), self.resources.count_store())
        schedule, upcoming = self.sampler.schedule, self.sampler.upcoming
        if not isinstance(schedule, MixtureSchedule):
            return metrics
        process = self.resources.process
        if process is not None and schedule.unsized is not None:
            schedule.unsized.estimates = process.report().estimates or schedule.unsized.estimates
        _, here = schedule.cursor_at(*upcoming)
        progress = {}
        for number, (source, taken) in enumerate(zip(self.sources, here.taken, strict=True)):
            length = None if source.packer is not None else source.manifest.config.get("seq_len")
            packed = self.reading.counts[number].totals()
            progress[source.name] = SourceProgress(
                samples=taken,
                epochs=schedule.count_epochs(number, taken, upcoming),
                tokens=None if length is None else taken * int(length),
                packed_documents=packed.packed_documents,
                packed_tokens=packed.packed_tokens,
                padding_tokens=packed.padding_tokens,
            )
        return MixtureMetrics(**vars(metrics), run_samples=here.position, sources=progress)
