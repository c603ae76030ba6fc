"""Small Llamas whose replicas lie on two ranks: one run over several layouts, and what the first step refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from penstock import SequenceCut
from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    Evaluation,
    ExpertsConfig,
    Llama,
    LlamaConfig,
    LossFunction,
    TrainerConfig,
    TrainerError,
    World,
)
from penstock.trainer.options import build_config
from penstock.trainer.parallel.config import open_mesh
from penstock.trainer.recipes.llama import plan

TOKENS, LENGTH, ROWS = 12, 8, 40
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"zero": 3}),
    (1, {}),
    (2, {"cp": 2, "zero": 1}),
    (2, {"tp": 2, "zero": 2}),
]
"""Ranks and layouts of the links of one run, each of ``STEPS`` steps."""

STEPS = 2


def make_model(**options: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return Llama(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **options}))


def make_mixture() -> Llama:
    """Experts, in place of layers, whose biases stay as they are."""
    return make_model(experts=ExpertsConfig(num_experts=4, balance="none"))


class CutArrays(ArrayLoader):
    """Parts of sequences, as SequenceCut makes them."""

    def __init__(self, *arguments: Any, part: int, parts: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.part, self.parts = part, parts

    def _take(self, rows: Any) -> dict[str, Tensor]:
        batch = super()._take(rows)
        places = SequenceCut(["tokens"]).positions(batch["tokens"].shape[1], self.part, self.parts)
        return {name: one[:, places] for name, one in batch.items()} | {"__positions__": places.repeat(len(rows), 1)}


def make_loader(
    parallel: Mapping[str, Any], world: World, *, shuffle: bool = True, length: int = LENGTH, cuts: bool = True
) -> ArrayLoader:
    mesh = open_mesh(build_config(TrainerConfig, {"steps": 1, "parallel": parallel}).parallel, world)
    random = torch.Generator().manual_seed(3)
    arrays = {
        "tokens": torch.randint(0, TOKENS, (ROWS, length), generator=random),
        "next": torch.randint(-3, TOKENS, (ROWS, length), generator=random).clamp(min=-1),
        "places": torch.arange(length).repeat(ROWS, 1),
        "documents": torch.randint(0, 2, (ROWS, length), generator=random).cumsum(1),
    }
    options: dict[str, Any] = {"global_batch_size": 6, "last_batch": "partial", "shuffle": shuffle}
    options |= {"rank": mesh.replica, "world_size": mesh.replicas}
    if mesh.sizes.cp > 1 and cuts:
        return CutArrays(arrays, part=mesh.place["cp"], parts=mesh.sizes.cp, **options)
    return ArrayLoader(arrays, **options)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores = model(batch["tokens"], batch["places"], batch["documents"]).flatten(0, 1)
    total = F.cross_entropy(scores, batch["next"].flatten(), ignore_index=-1, reduction="sum")
    return total, (batch["next"] >= 0).sum()


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    scores = model(batch["tokens"], batch["places"], batch["documents"])
    counts = batch["next"] >= 0
    found = F.cross_entropy(scores.flatten(0, 1), batch["next"].flatten(), ignore_index=-1, reduction="sum")
    return {"loss": (found, counts.sum()), "accuracy": ((scores.argmax(-1) == batch["next"]).sum(), counts.sum())}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def make_trainer(
    folder: str,
    world: World,
    steps: int,
    parallel: Mapping[str, Any],
    *,
    model: Callable[[], nn.Module] = make_model,
    loss: LossFunction = loss,
    **loaded: Any,
) -> DistributedTrainer:
    options: dict[str, Any] = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "parallel": parallel,
        "step": {"accumulate": 2, "clip_norm": 0.5},
        "ema": {"decay": 0.5},
        "checkpoint": {"every_steps": STEPS, "background": False},
        "report": {"quiet": True},
    }
    return DistributedTrainer(
        model(),
        adam,
        make_loader(parallel, world, **loaded),
        build_config(TrainerConfig, options),
        loss=loss,
        evaluation=Evaluation(batches=make_loader(parallel, world, shuffle=False), metrics=measure),
        world=world,
    )


def run_links(started: World, folder: str) -> dict[str, Any]:
    """Train the run over all layouts, each continuing from the one before; weights and metrics are rank 0's."""
    dist.destroy_process_group()
    found: dict[str, Any] = {"metrics": []}
    for number, (ranks, parallel) in enumerate(LAYOUTS):
        if started.rank < ranks:
            with _joined(folder, number, started.rank, ranks) as world:
                trainer = make_trainer(f"{folder}/run", world, STEPS * (number + 1), parallel)
                with trainer:
                    assert trainer.progress.step == STEPS * number
                    trainer.train()
                    found["metrics"].append(trainer.evaluate())
                found["weights"] = whole_weights(trainer.parallel.inner)
    if started.rank == 0:
        with _joined(folder, "alone", 0, 1) as world:
            found["expected metrics"] = []
            for number in range(len(LAYOUTS)):
                with make_trainer(f"{folder}/alone", world, STEPS * (number + 1), {}) as alone:
                    alone.train()
                    found["expected metrics"].append(alone.evaluate())
            found["expected"] = whole_weights(alone.parallel.inner)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-end", rank=started.rank, world_size=started.world_size
    )
    return found


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def plan_without_norms(model: nn.Module) -> Mapping[str, Any]:
    """The layers cut the sequence, and the norms between them are told nothing of it."""
    return {name: style for name, style in plan(model).items() if not name.endswith("input_layernorm")}


class Unattending(nn.Module):
    """Tells the next token from the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(TOKENS, TOKENS)

    def forward(self, tokens: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        return self.scores(tokens)


class Masking(Unattending):
    """Attends with a mask of the part, as models do that know no others."""

    def forward(self, tokens: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        x = self.scores(tokens)[:, None]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]


class Weighing(Unattending):
    """Asks torch's module for the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(TOKENS, 2, batch_first=True)

    def forward(self, tokens: Tensor, places: Tensor, documents: Tensor) -> Tensor:
        x = self.scores(tokens)
        return self.attend(x, x, x)[0]


def lose_twice(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    scores = model(batch["tokens"], batch["places"], batch["documents"])
    return (scores * torch.ones(scores.shape)).sum(), (batch["next"] >= 0).sum()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scores in parts": (
        {"tp": 2, "plan": {"lm_head": "colwise"}},
        {"model": lambda: make_model(vocab_size=2 * TOKENS, tie_word_embeddings=False)},
    ),
    "norms of parts": ({"tp": 2, "plan": plan_without_norms}, {}),
    "norms of parts, sharded": ({"tp": 2, "zero": 2, "plan": plan_without_norms}, {}),
    "odd sequences": ({"tp": 2}, {"length": LENGTH - 1}),
    "no room for a whole": ({"tp": 2, "plan": {"model.layers.*.mlp.down_proj": "rowwise"}}, {}),
    "other losses": ({"tp": 2}, {"loss": lose_twice}),
    "whole sequences": ({"cp": 2}, {"cuts": False}),
    "no attention": ({"cp": 2}, {"model": Unattending}),
    "mask of a part": ({"cp": 2}, {"model": Masking}),
    "weights of attention": ({"cp": 2}, {"model": Weighing}),
}
"""What the first step refuses: parallel's options, and what else is wrong."""


def refuse_all(world: World, folder: str) -> dict[str, str]:
    return {name: _find_refusal(world, f"{folder}/{name}", *case) for name, case in REFUSED.items()}


def _find_refusal(world: World, folder: str, parallel: dict[str, Any], wrong: dict[str, Any]) -> str:
    try:
        with make_trainer(folder, world, 1, parallel, **wrong) as trainer:
            trainer.train()
    except TrainerError as exc:  # on a rank that is told of another one's refusal, a StallError with its text
        return str(exc)
    return "nothing was refused"


@contextmanager
def _joined(folder: str, name: object, rank: int, ranks: int) -> Iterator[World]:
    """A world of the first ``ranks`` processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{name}", rank=rank, world_size=ranks)
    yield World(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    dist.destroy_process_group()
