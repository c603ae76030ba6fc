"""Options of DiLoCo: learners that train apart for many steps, and exchange what their weights have changed by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import TrainerConfigError
from ..options import check_choice, check_range

Codec = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class DilocoConfig:
    """Learners that train apart, and their exchanges (Douillard et al. 2023; by fragments, Douillard et al. 2025)."""

    over: Literal["allreduce", "server"] = "allreduce"
    """Exchange by all-reduce, or over a parameter server by the rules of trainer.server, with --workers of learners."""

    learners: int | None = None
    """Groups of ranks; none: a learner for each node where there are several, else for each rank."""

    ranks: int = 1
    """With over=server, ranks of each learner, which are processes of one machine."""

    every: int = 100
    """Steps of a learner between two exchanges of the same weights."""

    rate: float = 0.7
    """Rate of the outer optimizer, SGD with Nesterov momentum; 1 without momentum averages the weights."""

    momentum: float = 0.9
    """Momentum of the outer optimizer."""

    fragments: int = 1
    """Parts of the model that are exchanged in turn, evenly spread over the steps."""

    overlap: int = 0
    """Steps that training goes on between the start of an exchange and the use of its result."""

    alpha: float = 0.0
    """Share of a learner's own weights that stays when a result is used; 0: none."""

    codec: Literal["fp32", "bf16", "int8"] = "fp32"
    """Number format of the outer gradients on the wire; int8 with error feedback."""

    def __post_init__(self) -> None:
        key = "parallel.diloco"
        check_choice(f"{key}.over", self.over, ("allreduce", "server"))
        check_range(f"{key}.ranks", self.ranks, low=1)
        self._check_way()
        check_range(f"{key}.learners", self.learners, low=1)
        check_range(f"{key}.every", self.every, low=1)
        check_range(f"{key}.rate", self.rate, low=0.0, above=True)
        check_range(f"{key}.momentum", self.momentum, low=0.0)
        if self.momentum >= 1:
            raise TrainerConfigError(f"{key}.momentum={self.momentum} would never forget; give less than 1, as 0.9")
        check_range(f"{key}.fragments", self.fragments, low=1)
        check_range(f"{key}.overlap", self.overlap, low=0)
        check_range(f"{key}.alpha", self.alpha, low=0.0)
        if self.alpha >= 1:
            raise TrainerConfigError(
                f"{key}.alpha={self.alpha} would take nothing from other learners; give less than 1"
            )
        check_choice(f"{key}.codec", self.codec, ("fp32", "bf16", "int8"))
        if self.fragments > self.every:
            raise TrainerConfigError(
                f"{key}.fragments={self.fragments} are exchanged one a step at most, and {key}.every={self.every} has "
                "fewer steps; use fewer fragments, or more steps"
            )
        if self.overlap and self.overlap >= self.every // self.fragments:
            raise TrainerConfigError(
                f"{key}.overlap={self.overlap} must be less than the {self.every // self.fragments} steps between two "
                f"exchanges ({key}.every={self.every} / {key}.fragments={self.fragments}); one is under way at a time"
            )

    def _check_way(self) -> None:
        """Refuse options of the other way to exchange."""
        if self.over == "allreduce":
            if self.ranks != 1:
                raise TrainerConfigError(
                    f"parallel.diloco.ranks={self.ranks} is for parallel.diloco.over='server', and over='allreduce' "
                    "divides the ranks that there are into parallel.diloco.learners; give that"
                )
            return
        if self.learners is not None:
            raise TrainerConfigError(
                f"parallel.diloco.learners={self.learners} divides the ranks of a launcher, and with "
                f"parallel.diloco.over='server' learners are started: give --workers {self.learners}"
            )
        if self.codec != "fp32":
            raise TrainerConfigError(
                f"parallel.diloco.codec={self.codec!r} is for parallel.diloco.over='allreduce'; over servers give "
                f"server.push={self.codec!r}"
            )

    @property
    def is_average(self) -> bool:
        """Return whether the outer optimizer does no more than average the learners' weights, exactly."""
        return self.rate == 1 and self.momentum == 0 and self.codec == "fp32"

    def count_learners(self, world_size: int, num_nodes: int) -> int:
        """The number of learners in a world."""
        if self.learners is not None:
            return self.learners
        return num_nodes if num_nodes > 1 else world_size
