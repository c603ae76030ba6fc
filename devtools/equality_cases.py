"""Models that are hard to train alike on ranks, and the naive training of each in one process, without the trainer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from penstock import SequenceCut
from penstock.trainer import ExpertsConfig, Llama, LlamaConfig
from penstock.trainer.data.arrays import ArrayLoader
from penstock.trainer.ranks.mesh import Mesh
from penstock.trainer.reproducibility import seed_step

ROWS = 46  # five global batches and a rest
GLOBAL_BATCH = 8
SEED = 0
_WORDS, _LENGTH = 13, 5
_TOKENS, _SEQUENCE = 12, 8
_CPU = torch.device("cpu")
_PARTS = {"microbatches": 2}


class _Block(nn.Module):
    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(_LENGTH, _LENGTH).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2)).masked_fill(~self.mask, -1e4).softmax(-1)
        found: Tensor = x + self.drop(self.out(scores @ value))
        return found


class LanguageModel(nn.Module):
    """Words to the next word; the scores share the embedding's weight. Dropout draws from torch's generator."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(2)])
        self.scores = nn.Linear(width, _WORDS, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.scores(x)
        return found


class _Stage(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        share = 1.0 + 0.1 * np.random.rand() if self.training else 1.0
        return x + share * torch.relu(self.norm(self.convolve(x)))


class ResNet(nn.Module):
    """Batch norms that train, behind a stem that is frozen in evaluation mode. Draws from NumPy's generator."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.Dropout(0.5))
        self.stages = nn.ModuleList([_Stage(channels) for _ in range(2)])
        self.scores = nn.Linear(channels, 3)
        self.stem.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        found: Tensor = self.scores(x.mean((2, 3)))
        return found


class Tables(nn.Module):
    """Two tables of embeddings and how they interact. Draws from Python's generator."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(17, width), nn.Embedding(9, width)
        self.scores = nn.Sequential(nn.Linear(2 * width + 1, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = self.left(left), self.right(right)
        noise = 1.0 + 0.1 * random.random() if self.training else 1.0
        both = torch.cat([one, other, (one * other).sum(-1, keepdim=True)], dim=-1)
        found: Tensor = self.scores(noise * both)
        return found


class Bounded(torch.optim.Optimizer):
    """An optimizer that torch does not have: steps along the momentum, each element's at most the rate."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05, decay: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["updates"] = 0
                state["updates"] += 1
                momentum = state["momentum"].mul_(group["decay"]).add_(parameter.grad)
                parameter.sub_(group["lr"] * momentum / (1.0 + momentum.abs()))


class Encoder(nn.Module):
    """Two layers of attention in both directions, each token at the place that the batch says."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_TOKENS, width), nn.Embedding(_SEQUENCE, width)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.scores = nn.Linear(width, _TOKENS)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        x = self.words(words) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.scores(x)
        return found


class CutLoader(ArrayLoader):
    """Batches of which this rank computes a part of each sequence, as ``DistributedDataLoader`` cuts them."""

    def __init__(self, *arguments: Any, part: int, parts: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._part, self._parts = part, parts

    def _take(self, rows: Any) -> dict[str, Tensor]:
        batch = super()._take(rows)
        places = SequenceCut(["tokens"]).positions(_SEQUENCE, self._part, self._parts)
        cut = {name: one[:, places] if one.ndim == 2 else one for name, one in batch.items()}
        return cut | {"__positions__": places.repeat(len(rows), 1)}


Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data and its optimizer; ``loss`` returns a sum and a count, as the trainer wants it."""

    make_model: Callable[[], nn.Module]
    make_arrays: Callable[[torch.Generator], dict[str, Tensor]]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor | int]]
    last_batch: str = "partial"
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``parallel`` beside the layout's, by the dimension that takes them; those of others cannot be cut."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(5)
        return self.make_model().to(dtype)

    def loader(self, dtype: torch.dtype, rank: int, world_size: int, mesh: Mesh | None = None) -> ArrayLoader:
        """The share of one of ``world_size`` replicas; of ``mesh``, the part of sequences that this rank computes."""
        arrays = self.make_arrays(torch.Generator().manual_seed(3))
        wide = {name: one.to(dtype) if one.is_floating_point() else one for name, one in arrays.items()}
        options: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "last_batch": self.last_batch}
        options |= {"rank": rank, "world_size": world_size}
        if mesh is not None and mesh.sizes.cp > 1:
            return CutLoader(wide, part=mesh.place["cp"], parts=mesh.sizes.cp, **options)
        return ArrayLoader(wide, **options)


def _lose_words(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores, targets = model(batch["words"]).flatten(0, 1), batch["next"].flatten()
    return F.cross_entropy(scores, targets, ignore_index=-1, reduction="sum"), (targets >= 0).sum()


def _lose_images(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum"), len(batch["labels"])


def _lose_clicks(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    scores = model(batch["left"], batch["right"]).squeeze(-1)
    return F.binary_cross_entropy_with_logits(scores, batch["click"], reduction="sum"), len(scores)


def _lose_tokens(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores, targets = model(batch["tokens"], batch["places"], batch["documents"]), batch["next"].flatten()
    total = F.cross_entropy(scores.flatten(0, 1), targets, ignore_index=-1, reduction="sum")
    return total, (targets >= 0).sum()


def _lose_masked(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    scores, targets = model(batch["tokens"], batch["places"]).flatten(0, 1), batch["next"].flatten()
    return F.cross_entropy(scores, targets, ignore_index=-1, reduction="sum"), (targets >= 0).sum()


def _make_sequences(random: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(0, _TOKENS, (ROWS, _SEQUENCE), generator=random),
        "next": torch.randint(-3, _TOKENS, (ROWS, _SEQUENCE), generator=random).clamp(min=-1),  # as uneven as can be
        "places": torch.arange(_SEQUENCE).repeat(ROWS, 1),
        "documents": torch.randint(0, 2, (ROWS, _SEQUENCE), generator=random).cumsum(1),
    }


def _make_llama(*, tied: bool, experts: ExpertsConfig | None = None) -> Llama:
    config = LlamaConfig(
        vocab_size=_TOKENS,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        experts=experts,
    )
    return Llama(config)


def _make_mixture() -> Llama:
    # Biases that balance experts are moved by the trainer, of which the naive loop knows nothing.
    return _make_llama(tied=False, experts=ExpertsConfig(num_experts=4, num_experts_per_tok=2, balance="none"))


def _make_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


CASES: dict[str, Case] = {
    "lm": Case(
        LanguageModel,
        lambda random: {
            "words": torch.randint(0, _WORDS, (ROWS, _LENGTH), generator=random),
            "next": torch.randint(-1, _WORDS, (ROWS, _LENGTH), generator=random),  # -1: no target
        },
        _make_adam,
        _lose_words,
        parallel={"tp": {"plan": {"blocks.*.mix": "colwise_gathered", "blocks.*.out": "rowwise_of_whole"}}},
    ),
    "resnet": Case(
        ResNet,
        lambda random: {
            "images": torch.randn(ROWS, 2, 4, 4, generator=random),
            "labels": torch.randint(0, 3, (ROWS,), generator=random),
        },
        lambda parameters: torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.1, momentum=0.9),
        _lose_images,
        last_batch="drop",
    ),
    "embeddings": Case(
        Tables,
        lambda random: {
            "left": torch.randint(0, 17, (ROWS,), generator=random),
            "right": torch.randint(0, 9, (ROWS,), generator=random),
            "click": torch.randint(0, 2, (ROWS,), generator=random).float(),
        },
        Bounded,
        _lose_clicks,
    ),
    "llama": Case(
        lambda: _make_llama(tied=True),
        _make_sequences,
        _make_adam,
        _lose_tokens,
        parallel={"tp": {}, "cp": {}, "pp": _PARTS},
    ),
    "untied": Case(
        lambda: _make_llama(tied=False),
        _make_sequences,
        _make_adam,
        _lose_tokens,
        parallel={
            "tp": {"plan": {"use": "penstock.trainer.recipes.llama:plan", "args": {"loss": False}}},
            "cp": {},
            "pp": _PARTS,
        },
    ),
    "mixture": Case(_make_mixture, _make_sequences, _make_adam, _lose_tokens, parallel={"tp": {}, "cp": {}, "ep": {}}),
    "encoder": Case(Encoder, _make_sequences, _make_adam, _lose_masked, parallel={"cp": {}}),
}


@dataclass(frozen=True)
class Trained:
    """Result of a training: weights, and for each rank buffers, modules' modes and a digest of each generator.

    ``draws`` say for each rank as which replica it draws random numbers.
    """

    weights: dict[str, Tensor]
    buffers: list[dict[str, Tensor]]
    modes: list[dict[str, bool]]
    generators: list[dict[str, str]]
    draws: list[int]

    def laid_out(self, replicas: Sequence[int]) -> Trained:
        """The same for ranks of which each belongs to one of ``replicas``, as many as this has ranks."""
        return Trained(
            self.weights,
            [self.buffers[replica] for replica in replicas],
            [self.modes[replica] for replica in replicas],
            [self.generators[replica] for replica in replicas],
            list(replicas),
        )


def train_naively(
    case: Case, dtype: torch.dtype, *, ranks: int, accumulate: int, steps: int, clip_norm: float | None = None
) -> Trained:
    """The textbook's loop in one process, over what each of ``ranks`` would compute, one rank after another.

    All ranks' gradients are added up before the update. Each rank draws from generators of its own, begins a step with
    rank 0's buffers, and takes a batch norm's statistics over its own rows.
    """
    model = case.model(dtype)
    optimizer = case.make_optimizer(model.parameters())
    loaders = [case.loader(dtype, rank, ranks) for rank in range(ranks)]
    generators = [digest_generators()] * ranks
    step = 0
    while step < steps:
        epoch = list(zip(*loaders, strict=True))
        for start in range(0, len(epoch), accumulate):
            if step == steps:
                break
            total, before = 0, copy_buffers(model)
            after_first: dict[str, Tensor] = {}
            for rank in range(ranks):
                seed_step(SEED, step, rank, _CPU)
                model.load_state_dict(before, strict=False)
                for shares in epoch[start : start + accumulate]:
                    loss, count = case.loss(model, shares[rank])
                    loss.backward()  # type: ignore[no-untyped-call]
                    total += int(count)
                generators[rank] = digest_generators()
                after_first = copy_buffers(model) if rank == 0 else after_first
            model.load_state_dict(after_first, strict=False)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= total
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    weights = {name: one.detach() for name, one in model.named_parameters()}
    modes = {name: one.training for name, one in model.named_modules()}
    return Trained(weights, [copy_buffers(model)] * ranks, [modes] * ranks, generators, list(range(ranks)))


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's buffers by name, copied."""
    return {name: one.detach().clone() for name, one in model.named_buffers()}


def digest_generators() -> dict[str, str]:
    """A digest of the state of torch's, NumPy's and Python's global generators."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode(),
        "python": repr(random.getstate()).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}
