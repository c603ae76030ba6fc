"""The configuration of a training run: the configs of its parts, and which options exclude each other."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Literal

from .checkpoint.config import CheckpointConfig
from .compression.compression import CompressionConfig
from .data.shares import check_speed_shares
from .errors import TrainerConfigError
from .evaluation.evaluate import EvaluateConfig, good_end
from .options import check_choice, check_range
from .parallel.activation import ActivationConfig, CompileConfig
from .parallel.averaging import AveragingConfig
from .parallel.config import ParallelConfig
from .parallel.ema import EmaConfig
from .parallel.precision import PrecisionConfig
from .report.config import ReportConfig
from .report.tracing import ProfileConfig
from .server.config import ParameterServerConfig
from .steps.schedule import ScheduleConfig
from .steps.step import StepConfig
from .watch.spike import SpikeConfig
from .weights.warm_start import WarmStartConfig

# What parallel.mode="parameter_server" has a part for; of some tables only some keys.
_SERVED = (
    *("steps", "epochs", "seed", "device", "output_dir", "export", "stall_timeout_s", "parallel", "server"),
    *("precision", "step", "schedule", "evaluate", "checkpoint", "report"),
)
# What parallel.mode="diloco" has a part for over servers; a learner lays its own model out, and steps it.
_LEARNED = (
    *(*_SERVED, "init_from", "warm_start", "activation", "compile"),
    *("parallel.*", "precision.*", "step.microbatch", "step.on_nan", "step.max_skipped"),
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib leaves one slash of two


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How to train. Options that contradict one another are refused before anything is built."""

    steps: int | None = None
    """Stop after this many steps; none: after the epochs."""

    epochs: int | None = None
    """Stop after this many epochs; none: after the steps."""

    seed: int = 0
    """Seed of all randomness in a step, together with the step and the rank."""

    deterministic: bool = False
    """Take deterministic kernels alone, and refuse operations that have none."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where there is a device."""

    output_dir: str = "penstock-run"
    """Folder for metrics and everything else that is written."""

    init_from: str | None = None
    """Start with the weights of this run, safetensors file or Hugging Face folder; ignored when the run resumes."""

    export: str | None = None
    """Write the final weights, with ema.decay their average, to this safetensors file inside output_dir."""

    shares: Literal["equal", "auto"] = "equal"
    """auto: slower ranks get smaller shares of each global batch."""

    shares_every: int = 50
    """With shares=auto, steps between measurements of the time that each rank computes."""

    average_every: int | None = None
    """Local SGD: average the weights every so many steps instead of the gradients at each."""

    node_average_every: int | None = None
    """With average_every, also average within each node every so many steps."""

    stall_timeout_s: float | None = 600.0
    """Stop every rank when one has made no progress for this many seconds; none: never."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    server: ParameterServerConfig = field(default_factory=ParameterServerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    step: StepConfig = field(default_factory=StepConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        check_range("steps", self.steps, low=1)
        check_range("epochs", self.epochs, low=1)
        if self.steps is None and self.epochs is None:
            raise TrainerConfigError("neither steps nor epochs says when to stop; give one, as epochs=1")
        if _URL.match(str(self.output_dir)):
            raise TrainerConfigError(
                f"output_dir={str(self.output_dir)!r} is not a path; metrics are written to a file system: give a path "
                "there, and the URL as checkpoint.folder, where checkpoints alone are kept in the store"
            )
        if self.init_from is None and self.warm_start != WarmStartConfig():
            raise TrainerConfigError("warm_start says how to load weights, and init_from not from where; set it too")
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("shares", self.shares, ("equal", "auto"))
        check_range("shares_every", self.shares_every, low=1)
        check_range("stall_timeout_s", self.stall_timeout_s, low=0.0, above=True)
        if self.shares == "auto":
            check_speed_shares(self.parallel)
            if self.deterministic:
                raise TrainerConfigError(
                    "deterministic=True with shares='auto': shares follow measured times, and sums are rounded by "
                    "shares; use shares='equal'"
                )
        self._check_mode()
        self._check_layout()
        self._check_adaptive_batch()
        self._check_graphs()
        self._check_averaging()
        self._check_diloco()
        self._check_compression()
        self._check_spikes()
        if self.export is not None and not self.keeps_checkpoints:
            raise TrainerConfigError(
                f"export={self.export!r} is made from the last checkpoint, and checkpoint.every_steps=0 keeps none; "
                "set checkpoint.every_steps, or leave export out"
            )
        if self.checkpoint.keep_best and self.evaluate.best is None:
            raise TrainerConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs to know what is best; name the metric with "
                "evaluate.best, or set checkpoint.keep_best=0"
            )

        if self.evaluate.best is not None and self.best_end is None:
            raise TrainerConfigError(
                f"evaluate.best={self.evaluate.best!r}: its name does not tell whether high or low is good; say "
                "checkpoint.best='max' or 'min'"
            )

    @property
    def best_end(self) -> Literal["max", "min"] | None:
        """Good end of ``evaluate.best``: as ``checkpoint.best`` says, else by the metric's name; None if unknown."""
        if self.checkpoint.best is not None or self.evaluate.best is None:
            return self.checkpoint.best
        return good_end(self.evaluate.best)

    @property
    def keeps_checkpoints(self) -> bool:
        return bool(self.checkpoint.every_steps or self.checkpoint.keep_best)

    @property
    def averaging(self) -> AveragingConfig | None:
        """Averaging of weights, or None if gradients are exchanged at each step."""
        if self.average_every is None:
            return None
        return AveragingConfig(average_every=self.average_every, node_every=self.node_average_every)

    def _check_mode(self) -> None:
        """Refuse what a parameter server has no part in, and a table for one where there is none."""
        if not self.parallel.uses_servers:
            if self.server != ParameterServerConfig():
                raise TrainerConfigError(
                    f"[trainer.server] is for parallel.mode='parameter_server', and parallel.mode="
                    f"{self.parallel.mode!r}; set that, or leave the table out"
                )
            return
        is_learned = self.parallel.mode == "diloco"
        way = "parallel.diloco.over='server', where learners" if is_learned else ""
        way = way or "parallel.mode='parameter_server', where workers"
        other = "parallel.diloco.over" if is_learned else "parallel.mode"
        also = _LEARNED if is_learned else ()
        for where, given, kept in (
            ("parallel.", self.parallel, ("mode",)),
            ("", self, _SERVED),
            ("step.", self.step, ("clip_norm",)),
            ("precision.", self.precision, ("dtype",)),
            ("evaluate.", self.evaluate, ("best",)),
        ):
            for key in fields(given):
                value = getattr(given, key.name)
                default = key.default if key.default_factory is MISSING else key.default_factory()
                is_kept = key.name in kept or f"{where}{key.name}" in also or f"{where}*" in also
                if not is_kept and value != default:
                    shown = f"={value!r}" if not is_dataclass(value) else " is set, and"
                    raise TrainerConfigError(
                        f"{where}{key.name}{shown} has no part in {way} step "
                        f"by themselves; leave {where}{key.name} out, or use {other}='allreduce'"
                    )
        if is_learned:
            self._check_learned()
            return
        if self.precision.dtype == "fp16":
            raise TrainerConfigError(
                "precision.dtype='fp16' needs a loss scale that all workers share; use precision.dtype='bf16'"
            )

    def _check_learned(self) -> None:
        """Refuse what says twice, or cannot be, how learners exchange over servers."""
        if self.server.lease != ParameterServerConfig().lease:
            raise TrainerConfigError(
                f"server.lease={self.server.lease} with parallel.diloco.over='server': a learner leases the batches of "
                "its steps between two exchanges; leave server.lease out, and give parallel.diloco.every"
            )
        if self.step.on_nan == "rewind":
            raise TrainerConfigError(
                "step.on_nan='rewind' goes back to a checkpoint, and learners over servers do not; use "
                "step.on_nan='skip' or 'stop'"
            )

    def _check_layout(self) -> None:
        """Refuse what treats each rank as a replica where replicas lie on several."""
        spread = ((name, getattr(self.parallel, name)) for name in ("tp", "pp", "cp", "ep"))
        key = next((f"parallel.{name}={size}" for name, size in spread if size > 1), None)
        for other, is_set, cure in (
            (f"average_every={self.average_every}", self.average_every is not None, "leave average_every out"),
            (
                f"compression.scheme={self.compression.scheme!r}",
                self.compression.scheme != "none",
                "use compression.scheme='none'",
            ),
            ("step.adaptive_batch=True", self.step.adaptive_batch, "give step.microbatch by hand"),
            ("compile.cuda_graphs=True", self.compile.cuda_graphs, "use compile.cuda_graphs=False"),
        ):
            if key is not None and is_set:
                raise TrainerConfigError(
                    f"{other} takes each rank for a whole replica of the model, and {key} spreads a replica over "
                    f"several; {cure}, or leave parallel.{key.split('=')[0].removeprefix('parallel.')} out"
                )

        if self.parallel.cp > 1 and self.compile.enabled:
            raise TrainerConfigError(
                f"compile.enabled=True compiles attention as it is, and parallel.cp={self.parallel.cp} has it see the "
                "keys of other ranks; use compile.enabled=False, or leave parallel.cp out"
            )

    def _check_adaptive_batch(self) -> None:
        """Refuse the options whose collectives would hang while one rank probes its memory and others wait."""
        if not self.step.adaptive_batch:
            return
        for key, value in (("zero", self.parallel.zero), ("sync_batchnorm", self.parallel.sync_batchnorm)):
            if value:
                raise TrainerConfigError(
                    f"step.adaptive_batch=True tries microbatches on each rank by itself, and with parallel.{key}="
                    f"{value} a forward needs all ranks, so that a rank without memory would leave the others waiting; "
                    f"give step.microbatch by hand, or leave parallel.{key} out"
                )

    def _check_graphs(self) -> None:
        """A graph of backward writes gradients to its own memory, which the next microbatch's graphs use again."""
        if not self.compile.cuda_graphs:
            return
        step = self.step
        for key, value in (
            ("accumulate", step.accumulate if step.accumulate > 1 else None),
            ("microbatch", step.microbatch),
            ("adaptive_batch", step.adaptive_batch),
        ):
            if value:
                raise TrainerConfigError(
                    f"compile.cuda_graphs=True keeps gradients where the next microbatch's graphs write, and "
                    f"step.{key}={value} makes several microbatches a step; leave step.{key} out, or use "
                    "compile.cuda_graphs=False"
                )

    def _check_averaging(self) -> None:
        if self.average_every is None:
            if self.node_average_every is not None:
                raise TrainerConfigError(
                    f"node_average_every={self.node_average_every} needs average_every; set that too"
                )
            return
        if self.parallel.zero:
            raise TrainerConfigError(
                f"average_every={self.average_every} lets each rank train its own copy, and parallel.zero="
                f"{self.parallel.zero} has one copy in shards; use parallel.zero=0, or leave average_every out"
            )
        if self.shares == "auto":
            raise TrainerConfigError(
                f"shares='auto' with average_every={self.average_every}: averages count each rank's weights alike, and "
                "the rows of ranks with smaller shares would count for more; use shares='equal', or leave "
                "average_every out"
            )
        if self.compression.scheme != "none":
            raise TrainerConfigError(
                f"average_every={self.average_every} exchanges no gradients that compression.scheme="
                f"{self.compression.scheme!r} could compress; leave one of them out"
            )
        if self.step.on_nan != "stop" and self.step.clip_norm is not None:
            raise TrainerConfigError(
                f"step.on_nan={self.step.on_nan!r} with average_every={self.average_every} and step.clip_norm="
                f"{self.step.clip_norm} would skip updates on some ranks only; use step.on_nan='stop'"
            )
        _ = self.averaging

    def _check_diloco(self) -> None:
        if self.parallel.mode != "diloco":
            return
        for key, value, why, cure in (
            ("average_every", self.average_every, "is local SGD, another way to train apart", "leave one of them out"),
            (
                "compression.scheme",
                self.compression.scheme if self.compression.scheme != "none" else None,
                "compresses the gradients of each step, which stay inside a learner",
                "use parallel.diloco.codec for what learners exchange",
            ),
            (
                "shares",
                self.shares if self.shares == "auto" else None,
                "moves rows from slow ranks to fast ones, and learners wait for one another at exchanges alone",
                "use shares='equal'",
            ),
        ):
            if value is not None:
                raise TrainerConfigError(f"{key}={value!r} with parallel.mode='diloco': it {why}; {cure}")

    def _check_spikes(self) -> None:
        if self.spike.on_spike == "rewind":
            if not self.checkpoint.every_steps:
                raise TrainerConfigError(
                    "spike.on_spike='rewind' goes back to checkpoints, and checkpoint.every_steps=0 keeps none; set "
                    "checkpoint.every_steps, or spike.on_spike='note'"
                )
            kept = 1 + math.ceil(self.spike.margin / self.checkpoint.every_steps)
            if self.checkpoint.keep_last < kept:
                raise TrainerConfigError(
                    f"spike.margin={self.spike.margin} wants a checkpoint of so many steps before the spike, and "
                    f"checkpoint.keep_last={self.checkpoint.keep_last} may keep none; give checkpoint.keep_last={kept}"
                )
        elif self.step.on_nan == "rewind":
            raise TrainerConfigError(
                f"step.on_nan='rewind' rewinds as for a loss spike, and spike.on_spike={self.spike.on_spike!r}; set "
                "spike.on_spike='rewind' too, or step.on_nan='skip'"
            )

    def _check_compression(self) -> None:
        """Schemes with error feedback would keep a NaN for ever."""
        if not self.compression.remembers:
            return
        if self.compression.scheme == "topk" and self.step.clip_norm is not None:
            raise TrainerConfigError(
                f"step.clip_norm={self.step.clip_norm} with compression.scheme='topk' would clip sums of many steps' "
                "gradients, which arrive late and at once, and training diverges; leave step.clip_norm out (recipes: "
                "none), or use compression.scheme='int8'"
            )
        for key, value, cure in (
            ("precision.dtype", self.precision.dtype == "fp16", "bf16"),
            ("step.on_nan", self.step.on_nan != "stop", "stop"),
        ):
            if value:
                raise TrainerConfigError(
                    f"compression.scheme={self.compression.scheme!r} keeps what it does not send, so gradients of a "
                    f"skipped update would come back; use {key}={cure!r}, or compression.scheme='bf16'"
                )
