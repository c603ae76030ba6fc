"""Runs a schedule: each rank's forwards and backwards of the parts of one batch, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import TrainerConfigError
from .messages import Messages, expected_layout
from .orders import Action, Order
from .staged import Crossing, Layout, Rehearsal, StagedModel
from .times import Times

Contexts = Callable[[], AbstractContextManager[Any]]
Programme = Callable[[nn.Module, Any], Any]
"""(model, part of a batch) -> what a loss, or a function of metrics, returns."""


@dataclass
class _Held:
    """Tensors that a stage keeps of a part between its forward and the end of its backward."""

    incoming: list[Tensor]
    outgoing: list[Tensor]
    layouts: list[Layout]
    loss: Tensor | None = None
    weights: Any = None  # of a backward of inputs, what that of weights continues with
    left: tuple[list[Tensor], list[Tensor | None]] | None = None


class Runner:
    """One rank's stages at work. ``crossings`` has what crosses into each stage, by its number."""

    def __init__(
        self,
        staged: StagedModel,
        crossings: Mapping[int, Crossing],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._staged = staged
        self._crossings = crossings
        self._last = staged.cut.stages - 1
        self._messages = Messages(group, device, staged.cut.stages)
        self._device = device
        self.times = Times(device)

    def run(
        self,
        order: Order,
        rank: int,
        parts: Sequence[Any],
        programme: Programme,
        module: nn.Module,
        rehearsals: Mapping[tuple[int, int], Rehearsal],
        *,
        found: Callable[[int, Any], Tensor | None],
        weigh: Callable[[Tensor], Tensor] | None,
        contexts: tuple[Contexts, Contexts] = (nullcontext, nullcontext),
    ) -> None:
        """Do this rank's part of ``order``; a collective of the pipeline.

        ``rehearsals`` has those of the parts by (stage, part). ``found`` takes the number of a part, and what
        ``programme`` returned for it on the last stage, and returns its loss; ``weigh`` makes of that what backward
        runs from. Without ``weigh`` there are forwards only. ``contexts`` are made for each forward, and each backward.
        """
        self.times.begin()
        held: dict[tuple[int, int], _Held] = {}
        for action in order.actions[rank]:
            if weigh is None and action.kind not in ("F", "SEND_F", "RECV_F"):
                continue
            key = (action.stage, action.part)
            rehearsal = rehearsals[key]
            match action.kind:
                case "F":
                    incoming = self._take(action)
                    with self.times.computing(), contexts[0]():
                        part = parts[action.part]
                        held[key] = self._forward(action, order, part, programme, module, rehearsal, incoming, found)
                case "SEND_F":
                    self._send_forward(action, order, held[key])
                case "RECV_F":
                    layouts = list_layouts(rehearsal.received, self._crossings[action.stage])
                    self._messages.expect(("F", *key), layouts, order.rank_of[action.stage - 1])
                case "RECV_B":
                    self._expect_gradients(action, order, held[key])
                case "SEND_B":
                    self._send_gradients(action, order, held[key])
                case "B" | "I":
                    assert weigh is not None
                    is_last = action.stage == self._last
                    gradients = [] if is_last else self._messages.take(("B", *key))
                    with self.times.computing(), contexts[1]():
                        self._backward(action, order, held[key], module, weigh, gradients, is_split=action.kind == "I")
                case "W":
                    with self.times.computing(), contexts[1]():
                        self._backward_weights(action, held[key], module)
        self._messages.settle()
        self.times.end()

    def _take(self, action: Action) -> list[Tensor]:
        """Take what the stage before has sent."""
        if not action.stage:
            return []
        incoming = self._messages.take(("F", action.stage, action.part))
        if torch.is_grad_enabled():
            for tensor, flag in zip(incoming, self._crossings[action.stage].have_gradients, strict=True):
                tensor.requires_grad_(flag)
        return incoming

    def _forward(
        self,
        action: Action,
        order: Order,
        part: Any,
        programme: Programme,
        module: nn.Module,
        rehearsal: Rehearsal,
        incoming: list[Tensor],
        found: Callable[[int, Any], Tensor | None],
    ) -> _Held:
        stage = action.stage
        crossing = self._crossings.get(stage, Crossing())
        leaving = self._crossings.get(stage + 1, Crossing())
        returned, outgoing = self._staged.run(
            stage, lambda model: programme(model, part), module, rehearsal, incoming, crossing=crossing, leaving=leaving
        )
        held = _Held(
            incoming, outgoing, list_layouts({at: one[0] for at, one in rehearsal.sent.items() if one}, leaving)
        )
        for tensor, layout in zip(outgoing, held.layouts, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (layout.shape, layout.dtype):
                raise TrainerConfigError(
                    f"parallel.pp: {self._staged.cut.begins[stage]!r}, with which stage {stage + 1} begins, is called "
                    f"with a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} where {layout.dtype} and "
                    f"{layout.shape} follow from the shapes of the batch; let shapes depend on shapes only"
                )
        if stage == self._last:
            held.loss = found(action.part, returned)
        elif order.rank_of[stage + 1] == order.rank_of[stage]:
            self._messages.put(("F", stage + 1, action.part), outgoing)
        return held

    def _send_forward(self, action: Action, order: Order, held: _Held) -> None:
        key, rank = ("F", action.stage + 1, action.part), order.rank_of[action.stage + 1]
        self._messages.send(key, held.outgoing, held.layouts, rank)

    def _expect_gradients(self, action: Action, order: Order, held: _Held) -> None:
        pairs = zip(held.outgoing, held.layouts, strict=True)
        layouts = [layout for one, layout in pairs if one.requires_grad]
        self._messages.expect(("B", action.stage, action.part), layouts, order.rank_of[action.stage + 1])

    def _send_gradients(self, action: Action, order: Order, held: _Held) -> None:
        tensors = _gradients(held.incoming)
        layouts = [Layout.of(one) for one in held.incoming if one.requires_grad]
        self._messages.send(("B", action.stage - 1, action.part), tensors, layouts, order.rank_of[action.stage - 1])
        held.incoming = []

    def _backward(
        self,
        action: Action,
        order: Order,
        held: _Held,
        module: nn.Module,
        weigh: Callable[[Tensor], Tensor],
        taken: list[Tensor],
        *,
        is_split: bool,
    ) -> None:
        stage = action.stage
        outputs: list[Tensor]
        gradients: list[Tensor | None] = list(taken)
        if stage == self._last:
            assert held.loss is not None
            outputs, gradients = [weigh(held.loss)], [None]
            held.loss = None
        else:
            outputs = [one for one in held.outgoing if one.requires_grad]
        leaves = [one for one in held.incoming if one.requires_grad]
        if is_split and not leaves:
            held.left = (outputs, gradients)  # there are no gradients of inputs, and all of it is that of weights
        elif is_split:
            held.weights = _backward_of_inputs(outputs, gradients, leaves, module)
        elif outputs:
            torch.autograd.backward(outputs, gradients)
        held.outgoing = []
        if stage and order.rank_of[stage - 1] == order.rank_of[stage]:
            self._messages.put(("B", stage - 1, action.part), _gradients(held.incoming))
            held.incoming = []

    def _backward_weights(self, action: Action, held: _Held, module: nn.Module) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        if held.left is not None:
            if held.left[0]:
                torch.autograd.backward(held.left[0], held.left[1])
            held.left = None
            return
        stage_backward_weight((one for one in module.parameters() if one.requires_grad), held.weights)
        held.weights = None


def _backward_of_inputs(
    outputs: list[Tensor], gradients: list[Tensor | None], leaves: list[Tensor], module: nn.Module
) -> Any:
    from torch.distributed.pipelining._backward import stage_backward_input

    known: Any = None if gradients == [None] else gradients
    _, weights = stage_backward_input(outputs, known, leaves, (one for one in module.parameters() if one.requires_grad))
    return weights


def _gradients(incoming: list[Tensor]) -> list[Tensor]:
    """Those of what came in, zeros where it was not used."""
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in incoming if one.requires_grad]


def list_layouts(there: Mapping[int, Layout], crossing: Crossing) -> list[Layout]:
    """The dense layouts of what crosses, in order."""
    missing = [place for place in crossing.places if place not in there]
    if missing:
        raise TrainerConfigError(
            "parallel.stages: a stage's first module is called with other values of stages before than in the first "
            "step; let forward do the same for each batch"
        )
    return [expected_layout(there[place]) for place in crossing.places]
