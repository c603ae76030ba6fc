"""The cases of the comparison with one process, and the naive training that says what is right."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F  # noqa: N812

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config

STEPS = 20
ROWS = 62  # seven global batches of at most 10 rows; the last one has 2, so that of four ranks some have none


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 9)
        self.blocks = nn.ModuleList([Block(9) for _ in range(3)])
        self.leave = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.flatten(0, 1))


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, object] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None
    last_batch: str = "partial"
    adam: bool = False

    @property
    def config(self) -> TrainerConfig:
        return build_config(TrainerConfig, {"steps": STEPS, "precision": {"dtype": "fp32"}, **self.options})


def all_cases(size: int) -> list[Case]:
    uneven = tuple(float(1 + 2 * (rank % 2)) for rank in range(size))
    cases = [
        Case(f"zero{zero}", {"parallel": {"zero": zero}, "step": {"accumulate": 2, "clip_norm": 0.5}}, weights=uneven)
        for zero in range(4)
    ]
    cases += [Case(f"adam-zero{zero}", {"parallel": {"zero": zero}}, last_batch="pad", adam=True) for zero in (0, 3)]
    if size == 2:
        cases.append(Case("serial0", {"parallel": {"zero": 0, "overlap": False}, "step": {"accumulate": 2}}))
        cases.append(Case("serial3", {"parallel": {"zero": 3, "overlap": False}, "activation": {"every": 2}}))
        cases.append(Case("offload", {"parallel": {"zero": 2, "cpu_offload": True}, "step": {"accumulate": 3}}))
    if size == 4:
        cases.append(Case("hybrid", {"parallel": {"zero": 3, "hybrid": True}, "step": {"clip_norm": 0.5}}))
        cases.append(Case("scaled", {"parallel": {"zero": 1}, "schedule": {"shape": "cosine", "warmup_steps": 3}}))
    if size in (2, 4):
        for dtype in ("bf16", "fp16"):
            for zero in (0, 2):
                options = {"parallel": {"zero": zero}, "precision": {"dtype": dtype, "init_scale": 1024.0}}
                cases.append(Case(f"{dtype}-zero{zero}", options, weights=uneven))
    return cases


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "x": torch.randn(ROWS, 7, 6, generator=generator),
        "y": torch.randint(-1, 5, (ROWS, 7), generator=generator),  # -1: a token without a target
    }


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    targets = batch["y"]
    if "__valid__" in batch:
        targets = targets.masked_fill(~batch["__valid__"][:, None], -1)
    scores = model(batch["x"]).float()
    total = F.cross_entropy(scores, targets.flatten(), ignore_index=-1, reduction="sum")
    return total, (targets >= 0).sum()


def make_model() -> Net:
    torch.manual_seed(11)
    return Net()


def make_optimizer(case: Case) -> Callable[..., torch.optim.Optimizer]:
    if case.adam:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_case(case: Case, world: World) -> dict[str, torch.Tensor]:
    loader = ArrayLoader(
        data(), global_batch_size=10, last_batch=case.last_batch, rank=world.rank, world_size=world.world_size
    )
    if case.weights is not None:
        loader.set_shares(case.weights)
    model = make_model()
    if world.rank:
        for parameter in model.parameters():  # only the first rank's initial values may count
            parameter.data.fill_(7.0)
    with tempfile.TemporaryDirectory() as output_dir:
        config = build_config(
            TrainerConfig,
            {
                "steps": STEPS,
                "output_dir": output_dir,
                "report": {"quiet": True},
                "precision": {"dtype": "fp32"},
                **case.options,
            },
        )
        optimizer = make_optimizer(case)
        # A built optimizer and a function that builds one must do alike.
        given = optimizer(model.parameters()) if case.adam else optimizer
        with DistributedTrainer(model, given, loader, config, loss=loss, world=world) as trainer:
            summary = trainer.train()
        assert summary.steps == STEPS
        assert summary.updates == STEPS
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def train_naively(case: Case) -> dict[str, torch.Tensor]:
    """One process, whole global batches, the textbook's loop."""
    config = case.config
    arrays, model = data(), make_model()
    optimizer = make_optimizer(case)(model.parameters())
    batches = ArrayLoader(arrays, global_batch_size=10, last_batch="partial", rank=0, world_size=1)
    step = 0
    base = optimizer.param_groups[0]["lr"]
    while step < STEPS:
        epoch = list(batches)
        for start in range(0, len(epoch), config.step.accumulate):
            if step == STEPS:
                break
            parts = epoch[start : start + config.step.accumulate]
            batch = {name: torch.cat([part[name] for part in parts]) for name in arrays}
            if config.schedule.shape == "cosine":
                optimizer.param_groups[0]["lr"] = base * (
                    (step + 1) / 3
                    if step < 3
                    else 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (step - 3) / (STEPS - 3))).item())
                )
            total, count = loss(model, batch)
            optimizer.zero_grad()
            (total / count).backward()
            if config.step.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), config.step.clip_norm)
            optimizer.step()
            step += 1
    return dict(model.state_dict())
