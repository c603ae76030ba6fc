"""Trains on real ranks in one layout after another; one process that does no more than it must says what is right."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from pipeline_cases import CASES, Batch, Case
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from penstock.trainer import CheckpointError, DistributedTrainer, Evaluation, TrainerConfig, World
from penstock.trainer.options import build_config
from penstock.trainer.parallel.config import open_mesh
from penstock.trainer.steps.microbatches import cut_batch

STEPS = 10
ROWS = 16  # of all replicas together
BOUND = 1e-5


class Shares:
    """Each replica's rows of batches in which other numbers of losses count on each rank."""

    def __init__(self, case: Case, replica: int, replicas: int) -> None:
        self._case, self._replica, self._replicas = case, replica, replicas
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        while self._next < len(self):
            self._next += 1
            yield cut_batch(whole_batch(self._case, self._next - 1), self._replicas)[self._replica]

    def __len__(self) -> int:
        return 64

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


class Notes:
    """Observer of rank 0 that notes the loss of each step, and the names of the numbers that are recorded with it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.names: list[str] = []

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "train":
            self.losses.append(values["loss"])
            self.names.extend(values)

    def close(self) -> None:
        pass


def whole_batch(case: Case, number: int) -> Batch:
    found: Batch = cut_batch(case.batch(ROWS * (number + 1)), number + 1)[number]
    return found


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


def train_alone(
    case: Case,
    *,
    parts: int,
    accumulate: int = 1,
    clip: float | None = None,
    start: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and buffers, and the losses of each step and of an evaluation, of a loop over parts of batches."""
    model = case.model()
    if start is not None:
        model.load_state_dict(start)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        total, counted = 0.0, 0.0
        for number in range(step * accumulate, (step + 1) * accumulate):
            for part in cut_batch(whole_batch(case, number), parts):
                loss, count = case.loss(model, part)
                loss.backward()  # type: ignore[no-untyped-call]
                total, counted = total + float(loss.detach()), counted + float(count)
        for one in model.parameters():
            if one.grad is not None:
                one.grad /= counted
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / counted)
    with torch.no_grad():
        model.eval()
        loss, count = case.loss(model, whole_batch(case, 0))
    return {name: one.detach().clone() for name, one in model.state_dict().items()}, [*losses, float(loss / count)]


def train_spread(
    world: World,
    case: Case,
    layout: Mapping[str, Any],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """The same of a trainer in some layout, whole, on each rank; and the names of numbers in its records."""
    values: dict[str, Any] = {
        "steps": STEPS,
        "output_dir": tempfile.mkdtemp(),
        "precision": {"dtype": "fp32"},
        "parallel": dict(layout),
        "step": {"accumulate": accumulate, **({} if clip is None else {"clip_norm": clip})},
        "report": {"every": 1, "quiet": True},
        **options,
    }
    config = build_config(TrainerConfig, values)
    mesh = open_mesh(config.parallel, world)
    loader = Shares(case, mesh.replica, mesh.replicas)

    def measure(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
        return {"loss": case.loss(model, batch)}

    evaluation = Evaluation(batches=[cut_batch(whole_batch(case, 0), mesh.replicas)[mesh.replica]], metrics=measure)
    notes = Notes()
    with DistributedTrainer(
        case.model(),
        make_optimizer,
        loader,
        config,
        loss=case.loss,
        world=world,
        mesh=mesh,
        evaluation=evaluation,
        observers=[notes],
    ) as trainer:
        trainer.train()
        found = trainer.evaluate()
        assert found is not None
        notes.losses.append(found["loss"])
        whole = StateDictOptions(full_state_dict=True)
        own = {
            name: one.detach().clone()
            for name, one in get_model_state_dict(trainer.parallel.inner, options=whole).items()
        }
    everywhere: list[Any] = [None] * world.world_size
    dist.all_gather_object(everywhere, own)
    return {name: one for state in everywhere for name, one in state.items()}, notes.losses, notes.names


def start_with_weights(world: World, folder: str, layout: Mapping[str, Any]) -> list[str]:
    """The differences from one process, in words, of stages that start with the weights of a file.

    A file of tied weights may have any of their names, or all, if they agree.
    """
    wrong = []
    alone = {name: CASES[name].make().state_dict() for name in ("llama", "tied llama", "convolutions")}
    head, rows = "lm_head.weight", "model.embed_tokens.weight"
    tied, untied = alone["tied llama"], alone["llama"]
    files = {
        "all": ("llama", untied, untied),
        "batch norms": ("convolutions", alone["convolutions"], alone["convolutions"]),
        "the first name": ("tied llama", {name: one for name, one in tied.items() if name != head}, tied),
        "the last stage's name": ("tied llama", {name: one for name, one in tied.items() if name != rows}, tied),
        "both names": ("tied llama", tied, tied),
        "names that differ": ("tied llama", {**tied, head: tied[head] + 1}, None),
        "names that lack": ("llama", {name: one for name, one in untied.items() if name != head}, None),
        "too many names": ("llama", {**untied, "more": untied[head]}, None),
    }
    for label, (name, tensors, start) in files.items():
        path = f"{folder}/{label}.safetensors"
        if world.is_first:
            save_file({key: one.clone() for key, one in tensors.items()}, path)
        dist.barrier()
        try:
            found, losses, _ = train_spread(world, CASES[name], layout, init_from=path)
        except CheckpointError as exc:
            wrong.append(f"{label}: {exc}")
            continue
        replicas = world.world_size // (layout["pp"] * layout.get("tp", 1))
        expected, right = train_alone(CASES[name], parts=replicas * layout["microbatches"], start=start)
        wrong += differences(label, found, expected)
        if world.is_first:
            off = max(abs(one - other) for one, other in zip(losses, right, strict=True))
            wrong += [f"{label}: losses differ by {off:.1e}"] if off > BOUND else []
    return wrong


def compare_layouts(world: World, cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences from one process, in words, of cases of a model, a layout, and steps."""
    wrong = []
    for given in cases:
        case = CASES[given["model"]]
        layout, rest = given["layout"], {key: given[key] for key in ("accumulate", "clip") if key in given}
        found, losses, _ = train_spread(world, case, layout, **rest)
        replicas = world.world_size // (layout.get("pp", 1) * layout.get("tp", 1))
        parts = replicas * (layout["microbatches"] if layout.get("pp", 1) > 1 else 1)
        expected, right = train_alone(case, parts=parts, **rest)
        wrong += differences(str(dict(given)), found, expected)
        if world.is_first:
            off = max(abs(one - other) for one, other in zip(losses, right, strict=True))
            wrong += [f"{dict(given)}: losses differ by {off:.1e}"] if off > BOUND else []
    return wrong


def differences(label: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    missing = sorted(expected.keys() - found.keys())
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected.keys() & found.keys())
    wrong = [f"{label}: lacks {missing}"] if missing else []
    return [*wrong, f"{label}: weights or buffers differ by {worst:.1e}"] if worst > BOUND else wrong


def resume_across(world: World, model: str, layouts: Sequence[Mapping[str, Any]], folder: str) -> list[str]:
    """The differences from one process of a run that stops and resumes in each of the layouts in turn."""
    case = CASES[model]
    found: dict[str, Tensor] = {}
    names: list[str] = []
    for at, layout in enumerate(layouts, start=1):
        options: dict[str, Any] = {
            "steps": STEPS * at // len(layouts),
            "output_dir": folder,
            "checkpoint": {"every_steps": 100, "folder": "checkpoints"},
            "ema": {"decay": 0.5},
        }
        found, _, names = train_spread(world, case, layout, **options)
    expected, _ = train_alone(case, parts=8)
    wrong = differences(f"{model} {layouts}", found, expected)
    if world.is_first and "pp" in layouts[-1] and not {"bubble", "bubble_formula"} <= set(names):
        wrong.append(f"records have {names}")
    return wrong


def die_in_a_step(
    world: World,
    folder: str,
    layout: Mapping[str, Any] = {"pp": 2, "microbatches": 4},
    model: str = "perceptron",
    dying: int = 1,
) -> None:
    """Train in stages, of which one rank's process ends in its third step."""
    case = CASES[model]
    steps = []

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        steps.append(1)
        if world.rank == dying and len(steps) > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return case.loss(model, batch)

    options: dict[str, Any] = {
        "stall_timeout_s": 8.0 if world.world_size < 8 else 60.0,  # in which eight ranks must come to their first step
        "output_dir": folder,
        "checkpoint": {"every_steps": 1, "background": False, "folder": "checkpoints"},
        "ema": {"decay": 0.5},
    }
    train_spread(world, replace(case, loss=loss), layout, **options)
