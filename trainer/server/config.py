"""Configuration of a parameter server, as a recipe says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..options import check_choice, check_range
from .payloads import CODECS, CodecConfig
from .policies import AnyPolicy, parse_policy


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Rules between workers and the shards of a parameter server, with parallel.mode=parameter_server."""

    policy: str = "ssp(4)"
    """When workers wait for one another: bsp, ssp(4), asp, or quorum(3, 0.5), the grace in seconds."""

    lease: int = 8
    """Most batches that a worker takes at a time; with bsp one."""

    silence_s: float = 30.0
    """Seconds after which a worker that says nothing is forgotten, and its batches go to others."""

    push: Literal["fp32", "bf16", "int8", "topk"] = "fp32"
    """Format of gradients on their way to the servers; int8 and topk send later what they left out."""

    push_density: float = 0.01
    """With push=topk, the share of the elements that is sent."""

    pull: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of weights on their way to the workers."""

    replicas: Literal[1, 2] = 1
    """Shards that hold each value; with 2, none is lost with one of them. Not 2 in one process."""

    weights: Literal["measured", "equal"] = "measured"
    """Shards' shares of the values, on Ray: by the MB/s that workers measure, where moving some pays, or all alike."""

    scales_by_staleness: bool = False
    """Divide the rate of a push by 1 + the updates that came since its worker read."""

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        check_range("server.lease", self.lease, low=1)
        check_range("server.silence_s", self.silence_s, low=0.0, above=True)
        check_choice("server.push", self.push, CODECS)
        check_choice("server.pull", self.pull, ("fp32", "bf16", "int8"))
        check_range("server.push_density", self.push_density, low=0.0, above=True, high=1.0)
        check_choice("server.replicas", self.replicas, (1, 2))
        check_choice("server.weights", self.weights, ("measured", "equal"))

    @property
    def rule(self) -> AnyPolicy:
        """The policy as an object."""
        return parse_policy(self.policy)

    @property
    def push_codec(self) -> CodecConfig:
        """The codec of gradients."""
        return CodecConfig(codec=self.push, density=self.push_density)

    @property
    def pull_codec(self) -> CodecConfig:
        """The codec of weights."""
        return CodecConfig(codec=self.pull)
