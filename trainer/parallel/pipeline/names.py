"""Names in a checkpoint: those of the whole model, of which a rank of a pipeline has some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...errors import TrainerConfigError
from ...ranks.mesh import Mesh
from .ties import Tie


@dataclass(frozen=True, kw_only=True)
class StageNames:
    """Names that a rank's stages have, and others.

    ``elsewhere`` are names of weights and buffers that other ranks have; ``renamed`` maps names of this rank's weights
    to those that one process would call them by, where the weight has several; ``groups`` are the names of each of the
    optimizer's groups over all ranks.
    """

    elsewhere: frozenset[str]
    renamed: Mapping[str, str]
    groups: tuple[tuple[str, ...], ...]

    @property
    def state_elsewhere(self) -> frozenset[str]:
        """Names under which other ranks alone have a state of the optimizer."""
        return self.elsewhere - frozenset(self.renamed.values())

    def describe(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict of this rank by the whole model's names."""
        return _rename(described, self.renamed)

    def describe_whole(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The same with the names of all ranks in its groups, so that each rank saves the same groups."""
        renamed = self.describe(described)
        groups = zip(renamed["param_groups"], self.groups, strict=True)
        return {**renamed, "param_groups": [{**group, "params": list(names)} for group, names in groups]}

    def restore(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict by the whole model's names, by those of this rank."""
        return _rename(described, {there: here for here, there in self.renamed.items()})


def agree_on_names(
    model: nn.Module, whole: Collection[str], ties: Sequence[Tie], optimizer: Optimizer, mesh: Mesh
) -> StageNames:
    """The names of a rank's stages; a collective of the pipeline. ``whole`` has those of the whole model.

    Raises:
        TrainerConfigError: the optimizer has other groups on another stage, or puts a weight that two stages have into
            different ones.
    """
    here = dict(model.named_parameters(remove_duplicate=False))
    first = {name: tie.names[0] for tie in ties for name in tie.names}
    own_names = {id(one): name for name, one in reversed(list(model.named_parameters()))}
    renamed = {own_names[id(here[name])]: first[name] for name in here if name in first}
    groups = [
        (
            {key: repr(value) for key, value in group.items() if key != "params"},
            [own_names[id(one)] for one in group["params"]],
        )
        for group in optimizer.param_groups
    ]
    own_groups = [(settings, [renamed.get(name, name) for name in names]) for settings, names in groups]
    everywhere: list[Any] = [None] * mesh.sizes.pp
    dist.all_gather_object(everywhere, own_groups, group=mesh.pipeline_group)
    for rank, other in enumerate(everywhere):
        if [settings for settings, _ in other] != [settings for settings, _ in everywhere[0]]:
            raise TrainerConfigError(
                f"parallel.pp: the optimizer has {len(everywhere[0])} groups of parameters on pipeline rank 0 and "
                f"{len(other)}, or others, on rank {rank}; make as many groups with the same settings on each, of "
                "which some may be empty"
            )
    order = {name: at for at, name in enumerate(whole)}
    merged = [
        tuple(sorted({name for other in everywhere for name in other[number][1]}, key=lambda name: order.get(name, 0)))
        for number in range(len(own_groups))
    ]
    group_of: dict[str, int] = {}
    for number, names in enumerate(merged):
        for name in names:
            if group_of.setdefault(name, number) != number:
                raise TrainerConfigError(
                    f"parallel.pp: several stages have {name}, and the optimizer has it in group {group_of[name]} on "
                    f"one and in group {number} on another, so that its copies would drift apart; choose groups by "
                    "names or kinds of parameters, not by their places among those of a stage"
                )
    there = frozenset(whole) - frozenset(model.state_dict())
    return StageNames(elsewhere=there, renamed=renamed, groups=tuple(merged))


def _rename(described: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    state = {names.get(name, name): value for name, value in described["state"].items()}
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]} for group in described["param_groups"]
    ]
    return {**described, "state": state, "param_groups": groups}
