"""Experiment trackers: Weights & Biases and MLflow, each an optional package. A restarted run continues its own."""

from __future__ import annotations

import math
import queue
import secrets
import time
from pathlib import Path
from typing import Any

from ...storage.files import write_whole
from ...storage.threads.interruptible import Thread
from ..errors import TrainerConfigError, TrainerError
from .records import Observer, Values, spell

_QUEUED_RECORDS = 1000
_PATIENCE_S = 30.0
_TAG_CHARACTERS = 5000


class WandB:
    """Logs to a Weights & Biases run, whose id is kept in output_dir so that a restart continues it.

    The environment says the rest: WANDB_MODE=offline, WANDB_NAME, WANDB_ENTITY, WANDB_API_KEY.

    Raises:
        TrainerConfigError: the package is missing, or no run can be begun.
    """

    def __init__(self, project: str, output_dir: Path) -> None:
        try:
            import wandb
        except ImportError as exc:
            raise TrainerConfigError(
                f"report.wandb={project!r} needs the package wandb; install penstock[wandb], or leave it out"
            ) from exc
        path = output_dir / "wandb-run-id"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            run_id = _read_id(path) or secrets.token_hex(4)
            self._run: Any = wandb.init(project=project, dir=str(output_dir), id=run_id, resume="allow")
            write_whole(path, run_id.encode())
        except Exception as exc:
            raise TrainerConfigError(
                f"report.wandb={project!r}: no run can be begun ({exc}); log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave it out"
            ) from exc
        # A resumed run repeats steps, and W&B's own step counter never goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind == "start":
            self._run.config.update(dict(values), allow_val_change=True)
        elif kind == "note":
            self._run.log({"step": step, "note": str(values["note"])})
        else:
            self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in _finite(values).items()}})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to an MLflow run, whose id is kept in output_dir so that a restart continues it.

    The server is MLFLOW_TRACKING_URI; without it, MLflow's own default.

    Raises:
        TrainerConfigError: the package is missing, or no run can be begun.
    """

    def __init__(self, experiment: str, output_dir: Path) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError as exc:
            raise TrainerConfigError(
                f"report.mlflow={experiment!r} needs the package mlflow; install penstock[mlflow], or leave it out"
            ) from exc
        self._metric: Any = Metric
        path = output_dir / "mlflow-run-id"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self._client: Any = MlflowClient()
            self._run_id = _read_id(path)
            if self._run_id:
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                found = self._client.get_experiment_by_name(experiment)
                number = self._client.create_experiment(experiment) if found is None else found.experiment_id
                self._run_id = self._client.create_run(number).info.run_id
                write_whole(path, self._run_id.encode())
        except Exception as exc:
            raise TrainerConfigError(
                f"report.mlflow={experiment!r}: no run can be begun ({exc!s:.400}); set MLFLOW_TRACKING_URI to a "
                f"server that answers, delete {path} to begin a new run if there is one, or leave it out"
            ) from exc
        self._has_ended = False

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind in ("start", "note", "failure"):
            for name, value in values.items():
                self._client.set_tag(self._run_id, f"penstock.{name}", str(value)[:_TAG_CHARACTERS])
            return
        self._has_ended = self._has_ended or kind == "end"
        now_ms = int(time.time() * 1e3)
        metrics = [
            self._metric(f"{kind}/{name}", float(value), now_ms, step)
            for name, value in spell(_finite(values), _allowed).items()
            if isinstance(value, (int, float))
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if self._has_ended else "FAILED")


class InBackground:
    """Calls an observer in a thread of its own, so that training does not wait for a server.

    What it raises is raised by the next ``record``. When its queue is full, records are dropped and counted.
    """

    def __init__(self, observer: Observer) -> None:
        self._name = type(observer).__name__
        self._observer = observer
        self._error: Exception | None = None
        self._dropped = 0
        self._records: queue.SimpleQueue[tuple[str, int, Values] | None] = queue.SimpleQueue()  # Ctrl-C cannot lock it
        self._thread = Thread(target=self._run, name=f"penstock-{self._name}")
        self._thread.start()

    def record(self, kind: str, step: int, values: Values) -> None:
        if self._error is not None:
            raise self._error
        if self._records.qsize() >= _QUEUED_RECORDS:
            self._dropped += 1
        else:
            self._records.put((kind, step, values))

    def close(self) -> None:
        """Wait for what is queued, at most half a minute."""
        deadline_s = time.monotonic() + _PATIENCE_S
        if self._error is None:
            self._records.put(None)
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._error is None and self._thread.is_alive():
            raise TrainerError(f"{self._name} is {self._records.qsize()} records behind and is not waited for")
        if self._error is not None:
            raise self._error
        if self._dropped:
            raise TrainerError(f"{self._name} was too slow for {self._dropped} records, which it did not get")

    def _run(self) -> None:
        try:
            while (entry := self._records.get()) is not None:
                self._observer.record(*entry)
        except Exception as exc:  # noqa: BLE001 - raised by the next call
            self._error = exc
        except BaseException as exc:  # noqa: BLE001 - as above, but that it would end the run as if that were done
            self._error = TrainerError(f"{self._name} ended with {exc!r}")
        try:
            self._observer.close()
        except Exception as exc:  # noqa: BLE001 - as above
            self._error = self._error or exc


def _read_id(path: Path) -> str:
    """The id that was kept; empty without a file, or of one that a full disk left empty."""
    return path.read_text().strip() if path.exists() else ""


def _finite(values: Values) -> Values:
    return {k: v for k, v in values.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}


def _allowed(name: str) -> str:
    """The name with what MLflow does not allow in one replaced."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
