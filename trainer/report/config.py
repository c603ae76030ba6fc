"""Configuration of reports: their content, interval and destinations."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TrainerConfigError
from ..options import check_range


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is reported, how often, and where."""

    every: int = 10
    """Steps between records; numbers in between are averaged."""

    progress_s: float = 0.5
    """Seconds between updates of the progress line; 20 times as long where there is no terminal."""

    quiet: bool = False
    """Show neither the progress line nor the closing table."""

    count_flops: bool = False
    """Count the FLOPs of a sample once, before the first step, on a copy of the model without data; for MFU."""

    flops_per_sample: float | None = None
    """FLOPs of forward and backward for one sample, where you know them better; for MFU."""

    flops_per_token: float | None = None
    """The same for one unit of the loss's count, such as a token."""

    peak_flops: float | None = None
    """FLOP/s that one device can reach; known for common GPUs."""

    tensorboard: bool = False
    """Also write TensorBoard events to output_dir/tensorboard."""

    status_s: float | None = 1.0
    """Seconds between updates of each rank's status in output_dir/ranks, which `penstock top` shows; longer where there
    are more than 256 ranks. None writes none."""

    prometheus_port: int | None = None
    """Also serve Prometheus metrics on this port of rank 0's node: the run's, and each rank's."""

    prometheus_address: str = "127.0.0.1"
    """Address to serve them on; one that others reach, such as 0.0.0.0, needs PENSTOCK_METRICS_TOKEN."""

    wandb: str | None = None
    """Also log to this Weights & Biases project; its other settings are WANDB_ environment variables."""

    mlflow: str | None = None
    """Also log to this MLflow experiment; the server is MLFLOW_TRACKING_URI."""

    def __post_init__(self) -> None:
        check_range("report.every", self.every, low=1)
        check_range("report.progress_s", self.progress_s, low=0.0)
        check_range("report.status_s", self.status_s, low=0.1)
        check_range("report.prometheus_port", self.prometheus_port, low=1, high=65535)
        check_range("report.flops_per_sample", self.flops_per_sample, low=0.0, above=True)
        check_range("report.flops_per_token", self.flops_per_token, low=0.0, above=True)
        check_range("report.peak_flops", self.peak_flops, low=0.0, above=True)
        ways = {
            "count_flops": self.count_flops or None,
            "flops_per_sample": self.flops_per_sample,
            "flops_per_token": self.flops_per_token,
        }
        given = [f"report.{name}={value}" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise TrainerConfigError(f"{' and '.join(given)} both say what a step computes; leave one of them out")
        if self.peak_flops is not None and not given:
            raise TrainerConfigError(
                f"report.peak_flops={self.peak_flops} is compared with what a step computes; set report.count_flops, "
                "report.flops_per_sample or report.flops_per_token too"
            )
        for name, value in (("wandb", self.wandb), ("mlflow", self.mlflow)):
            if value == "":
                raise TrainerConfigError(f"report.{name}='' names nothing; give a name, or leave it out")
