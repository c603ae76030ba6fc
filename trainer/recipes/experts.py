"""A mixture of experts in place of a feed-forward layer: each token is computed by a few of many networks.

Which experts a token gets depends on its own row alone: capacity and the auxiliary loss, too, are taken over a row (a
sequence), not over a batch. So results do not depend on how batches are cut over ranks and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from ..errors import TrainerConfigError
from ..options import check_choice, check_range
from ..parallel.experts import ExpertExchange
from ..parallel.pipeline.ghosts import has_values


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Number of experts, and how tokens are shared out among them.

    Raises:
        TrainerConfigError: values that do not go together, naming key, value and cure.
    """

    num_experts: int
    num_experts_per_tok: int = 2
    """Experts that compute each token."""

    intermediate_size: int | None = None
    """Width inside an expert; none: that of the model's feed-forward layers."""

    capacity_factor: float | None = None
    """Most tokens of a row that an expert takes, as a multiple of an even share; none: all that choose it."""

    balance: Literal["bias", "loss", "none"] = "bias"
    """bias: experts with less than their share are preferred a little more after each step (Wang et al. 2024); loss:
    an auxiliary loss (Fedus et al. 2022)."""

    bias_rate: float = 1e-3
    """With balance="bias", change of an expert's bias after each step; scores are between 0 and 1."""

    loss_weight: float = 1e-2
    """With balance="loss", the factor of the auxiliary loss, which is 1 where all experts have their share."""

    def __post_init__(self) -> None:
        check_range("num_experts", self.num_experts, low=1)
        check_range("num_experts_per_tok", self.num_experts_per_tok, low=1)
        check_range("intermediate_size", self.intermediate_size, low=1)
        check_range("capacity_factor", self.capacity_factor, low=0.0, above=True)
        check_choice("balance", self.balance, ("bias", "loss", "none"))
        check_range("bias_rate", self.bias_rate, low=0.0)
        check_range("loss_weight", self.loss_weight, low=0.0)
        if self.num_experts_per_tok > self.num_experts:
            raise TrainerConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} of num_experts={self.num_experts}; use "
                f"{self.num_experts} or fewer"
            )


class Router(nn.Module):
    """Chooses the experts of each token by their scores, softmax(x W), and weights them by these.

    ``bias`` (experts,) is added to scores for the choice alone; it is moved by ``balance``, not by a gradient.
    """

    bias: Tensor

    def __init__(self, width: int, config: ExpertsConfig, std: float) -> None:
        super().__init__()
        self.config, self.std = config, std
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (B, T, k) and numbers (B, T, k) of the experts of x (B, T, width), and scores (B, T, experts).

        A weight of 0 stands for an expert that has no room left for the token.
        """
        # Rounded scores would choose other experts. The meta device has no autocast.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            scores = F.linear(x.to(wide), self.weight.to(wide)).softmax(-1)
        chosen = (scores.detach() + self.bias.float()).topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.config.num_experts_per_tok > 1:  # a single one's weight is its score, or scores would get no gradient
            weights = weights / weights.sum(-1, keepdim=True)
        if self.config.capacity_factor is not None:
            weights = weights * self._has_room(chosen)
        return weights, chosen, scores

    def _has_room(self, chosen: Tensor) -> Tensor:
        """(B, T, k) bool: whether an expert takes the token; earlier tokens of a row come first."""
        batch, length, each = chosen.shape
        assert self.config.capacity_factor is not None
        room = math.ceil(self.config.capacity_factor * length * each / self.config.num_experts)
        marks = F.one_hot(chosen, self.config.num_experts).view(batch, length * each, -1)
        place = (marks.cumsum(1) * marks).sum(-1).view(batch, length, each)
        return place <= room


class Experts(nn.Module):
    """SwiGLU networks, whose weights are stacked: (experts, outputs, inputs).

    Where they are spread over ranks, ``exchange`` says how, and the weights here are those of this rank's experts.
    """

    def __init__(self, width: int, inner: int, config: ExpertsConfig, std: float, residual_std: float) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.std, self.residual_std = std, residual_std
        self.gate_proj = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.up_proj = nn.Parameter(torch.empty(config.num_experts, inner, width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, width, inner))
        self.exchange: ExpertExchange | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_proj, std=self.std)
        nn.init.normal_(self.up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.residual_std)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results (N, width) of rows (N, width), which are ordered by expert; ``counts`` (experts,) are for each."""
        if self.exchange is None:
            return self._compute(rows, counts)
        arrived, own, journey = self.exchange.send(rows, counts)
        return self.exchange.send_back(self._compute(arrived, own), journey)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        stacked = self.gate_proj, self.up_proj, self.down_proj
        weights = tuple(one.to_local() if isinstance(one, DTensor) else one for one in stacked)
        if not has_values(rows):  # numbers are not known there; each row costs as much with any expert
            gate, up, down = (weight[0] for weight in weights)
            return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up, down = (weight.to(rows.dtype).transpose(1, 2) for weight in weights)
            inner = F.silu(torch._grouped_mm(rows, gate, offs=ends)) * torch._grouped_mm(rows, up, offs=ends)
            return torch._grouped_mm(inner, down, offs=ends)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(own, gate)) * F.linear(own, up), down)
                for own, gate, up, down in zip(torch.split(rows, counts.tolist()), *weights, strict=True)
            ]
        )


class MixtureOfExperts(nn.Module):
    """The sum of a token's experts' results by their weights, (B, T, width) of (B, T, width).

    Mutable state beside the router's bias: the tokens of each expert since the last update, and the shares before it.
    """

    def __init__(self, width: int, inner: int, config: ExpertsConfig, std: float, residual_std: float) -> None:
        super().__init__()
        self.config = config
        self.router = Router(width, config, std)
        self.experts = Experts(width, config.intermediate_size or inner, config, std, residual_std)
        self.shares: Tensor | None = None
        """(experts,) float64: shares of the tokens before the last update, over all ranks; their sum is 1."""

        self.auxiliary_loss: Tensor | None = None
        """With balance="loss", the last forward's, summed over its tokens."""

        self._load: Tensor | None = None

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """``is_token`` (B, T) bool is false for padding, which is computed and not counted; None counts everything."""
        weights, chosen, scores = self.router(x)
        flat = chosen.flatten()
        is_taken = weights.detach().flatten() > 0
        self._count(chosen, scores, is_token)
        # Rows in the order of their experts; those without room come last, and are left out.
        order = torch.where(is_taken, flat, self.config.num_experts).argsort(stable=True)
        taken = _count_experts(flat, self.config.num_experts, is_taken)
        if self.config.capacity_factor is not None and has_values(x):
            order = order[: int(taken.sum())]
        tokens = order // self.config.num_experts_per_tok
        results = self.experts(x.flatten(0, 1)[tokens], taken)
        weighted = results * weights.flatten()[order, None].to(results.dtype)
        return torch.zeros_like(x).flatten(0, 1).index_add(0, tokens, weighted.to(x.dtype)).view_as(x)

    @property
    def adds_loss(self) -> bool:
        """Return whether forward leaves an auxiliary loss, which the loss function must add."""
        return self.config.balance == "loss"

    def after_update(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Balance the experts by their loads in the step; ``add_up`` sums a tensor over ranks of other tokens."""
        load, self._load = self._load, None
        if load is None:
            load = torch.zeros(self.config.num_experts, dtype=torch.float64, device=self.router.bias.device)
        load = add_up(load)
        self.shares = load / load.sum().clamp(min=1.0)
        if self.config.balance == "bias":
            with torch.no_grad():
                self.router.bias += self.config.bias_rate * (load.mean() - load).sign().to(self.router.bias.dtype)

    def forget_step(self) -> None:
        """Forget the loads counted so far: a step begins."""
        self._load = None

    def describe_step(self) -> dict[str, Tensor]:
        """Tokens of the busiest and of the idlest expert in the last update, as multiples of an even share.

        Both are NaN where no token came, as on other stages of a pipeline.
        """
        if self.shares is None:
            return {}
        loads = torch.where(self.shares.sum() > 0, self.shares * self.config.num_experts, math.nan)
        return {"expert_load_max": loads.max(), "expert_load_min": loads.min()}

    def _count(self, chosen: Tensor, scores: Tensor, is_token: Tensor | None) -> None:
        if not (self.training and torch.is_grad_enabled()):
            self.auxiliary_loss = None
            return
        if has_values(chosen):
            counted = None if is_token is None else is_token[..., None].expand_as(chosen).flatten()
            load = _count_experts(chosen.flatten(), self.config.num_experts, counted).double()
            self._load = load if self._load is None else self._load.to(load.device) + load
        if self.config.balance == "loss":
            chose = F.one_hot(chosen, self.config.num_experts).sum(2).float()  # (B, T, experts)
            counts = torch.ones_like(chose[..., :1]) if is_token is None else is_token[..., None].to(chose.dtype)
            lengths = counts.sum(1)  # (B, 1)
            shares, means = ((one * counts).sum(1) / lengths.clamp(min=1.0) for one in (chose, scores))
            even = self.config.num_experts / self.config.num_experts_per_tok
            balance = even * (shares * means).sum(-1)  # (B,), 1 where all have their share
            self.auxiliary_loss = self.config.loss_weight * (lengths[:, 0] * balance).sum()


def list_mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """The model's mixtures of experts, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MixtureOfExperts))


def _count_experts(chosen: Tensor, experts: int, is_taken: Tensor | None = None) -> Tensor:
    """(experts,) int64: how many of ``chosen`` (N,) are of each, where they are taken."""
    ones = torch.ones_like(chosen) if is_taken is None else is_taken.long()
    return torch.zeros(experts, dtype=torch.long, device=chosen.device).scatter_add(0, chosen, ones)
