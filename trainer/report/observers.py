"""Observers of a run: TensorBoard, and all others that a config asks for.

Everything here runs on rank 0 only and receives plain numbers; nothing here may take part in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...storage.files import write_whole
from ..errors import TrainerConfigError, TrainerError
from .config import ReportConfig
from .console import ProgressLine
from .json_lines import JsonLines
from .prometheus import Prometheus
from .records import Observer, TemporaryObserverError, Values
from .status.rank_status import RankStatus
from .trackers import InBackground, MLflow, WandB

_PROBE_BYTES = 1 << 16


class TensorBoard:
    """Scalars as TensorBoard events, in a new file for each start and rewind, with which TensorBoard hides later steps.

    While they cannot be written records are lost, and each next one tries again, in a new file. All mutable state: the
    writer, which the first record makes, and how many records are lost.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as exc:
            raise TrainerConfigError(
                "report.tensorboard=True needs the package tensorboard; install penstock[metrics], or leave it out"
            ) from exc
        self._make_writer: Callable[..., Any] = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._lost = 0
        try:
            self._probe()
        except OSError as exc:
            raise TrainerError(
                f"{folder} cannot be written ({exc.strerror or exc}); make it a folder with room, or leave "
                "report.tensorboard out"
            ) from exc

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind == "note":
            return
        try:
            goes_on_from = step
            if kind == "rewind":
                self._end_file()
                goes_on_from = int(values["to_step"] or 0)
            if self._writer is None:
                self._probe()  # else each try would leave an empty file, and a thread that fails
                self._writer = self._make_writer(log_dir=str(self._folder), purge_step=goes_on_from + 1)
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
            self._lost = 0
        except OSError as exc:
            with suppress(OSError):
                self._end_file()
            self._lost += 1
            if self._lost == 1:
                raise TemporaryObserverError(
                    f"{self._folder} cannot be written ({exc.strerror or exc}), so TensorBoard misses records; "
                    "the next one tries again"
                ) from exc

    def close(self) -> None:
        self._end_file()
        if self._lost:
            raise TrainerError(f"the last {self._lost} records could not be written to {self._folder}")

    def _end_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _probe(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        probe = self._folder / ".probe"
        try:
            write_whole(probe, bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)


def open_observers(
    config: ReportConfig,
    output_dir: Path,
    total_steps: int | None,
    list_ranks: Callable[[], Sequence[RankStatus]] = list,
) -> Sequence[Observer]:
    """The observers that the config asks for; called on rank 0. ``list_ranks`` tells of all ranks, from any thread."""
    observers: list[Observer] = [JsonLines(output_dir / "metrics.jsonl")]
    try:
        if config.tensorboard:
            observers.append(TensorBoard(output_dir / "tensorboard"))
        if config.prometheus_port is not None:
            address = config.prometheus_address
            observers.append(Prometheus(config.prometheus_port, address, list_ranks=list_ranks))
        if config.wandb is not None:
            observers.append(WandB(config.wandb, output_dir))
        if config.mlflow is not None:
            observers.append(InBackground(MLflow(config.mlflow, output_dir)))
    except TrainerError:
        for observer in observers:
            observer.close()
        raise
    if not config.quiet:
        observers.append(ProgressLine(every_s=config.progress_s, total_steps=total_steps))
    return observers
