"""A Llama (Touvron et al. 2023) on packed documents: pieces of Python's standard library, as tokens of a small BPE.

Its modules have the names that they have in ``transformers``, and with them the tensors of checkpoints and exports, so
that folders of Hugging Face are read and written without a rule for names, and plans that name modules, such as
``model.layers.*.self_attn.q_proj`` of tensor parallelism, are those that others publish for the Llama family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput
from torch.nn import functional as F  # noqa: N812

from ..data.batches import VALID
from ..errors import TrainerConfigError
from ..parallel.context import sequence_places, whole_sequence
from .experts import ExpertsConfig, MixtureOfExperts, list_mixtures
from .gpt import Tokens, open_texts
from .llama_config import LLAMA3_SCALING, LlamaConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (B or 1, 1, T, head_dim / 2)."""

_NO_TARGET = -100
_PADDING = -1  # in document_ids, as packing has it


class Linear(nn.Linear):
    """A product with a matrix, without a bias, whose initial weights have the standard deviation ``std``."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std  # which the constructor's reset_parameters reads
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Vectors of tokens, initialised as ``Linear`` is, with which it may share its weight."""

    def __init__(self, vocabulary: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal attention whose heads of keys and values each serve several heads of queries (Ainslie et al. 2023)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, std = config.hidden_size, config.initializer_range
        self.head_width = config.head_width
        self.q_proj = Linear(width, config.num_attention_heads * self.head_width, std)
        self.k_proj = Linear(width, config.key_value_heads * self.head_width, std)
        self.v_proj = Linear(width, config.key_value_heads * self.head_width, std)
        self.o_proj = Linear(config.num_attention_heads * self.head_width, width, _residual_std(config))

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        # (B, T, heads * W) -> (B, heads, T, W); of heads there are as many as a rank has columns for
        query, key, value = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        served = query.shape[1] // key.shape[1]
        if served > 1:  # written out, because kernels that take a mask take no groups
            key, value = key.repeat_interleave(served, dim=1), value.repeat_interleave(served, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        result: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return result


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): a gate and what it lets through, both linear, and back to the width."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate_proj = Linear(width, inner, std)
        self.up_proj = Linear(width, inner, std)
        self.down_proj = Linear(inner, width, _residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(nn.Module):
    """Attention and a feed-forward layer, or experts, each with a norm before it and a residual around it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config) if config.experts is None else _make_experts(config, config.experts)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, is_token: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        more = {} if is_token is None else {"is_token": is_token}
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x), **more)
        return result


class Decoder(nn.Module):
    """From tokens to the vectors from which the next ones are told, (B, T, hidden_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> Tensor:
        length, limit = tokens.shape[1], self.config.max_position_embeddings
        if length > limit:
            raise TrainerConfigError(
                f"sequences of {length} tokens are longer than max_position_embeddings={limit}; raise that, or "
                "shorten them"
            )
        x: Tensor = self.embed_tokens(tokens)
        if positions is None:
            positions = sequence_places(length, tokens.device)[None]
        rotation = make_rotation(positions, self.config, x.dtype)
        mask = None if documents is None else mask_documents(documents)
        # Experts count the tokens that choose them, and padding is none.
        more = () if documents is None or self.config.experts is None else (documents >= 0,)
        for layer in self.layers:
            x = layer(x, rotation, mask, *more)
        result: Tensor = self.norm(x)
        return result


class Llama(nn.Module):
    """Scores of each next token, (B, T, vocab_size), of tokens, (B, T) int64.

    Of packed sequences, ``positions`` (B, T) begin at 0 in each document, and ``documents`` (B, T) number them, -1 for
    padding: tokens attend to those before them in their own document. Without, each row is one document.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        scores: Tensor = self.lm_head(self.model(tokens, positions, documents))
        return scores

    def parallelize_plan(self) -> Mapping[str, ParallelStyle | str]:
        """The plan of tensor parallelism where no other is given."""
        return plan(self)


def plan(model: nn.Module, *, sequence: bool = True, loss: bool = True) -> Mapping[str, ParallelStyle | str]:
    """The plan of tensor parallelism: attention cut by heads, the feed-forward layer by columns, both by one exchange.

    With ``sequence``, norms and residuals are cut along the sequence (Korthikanti et al. 2022), whose length must then
    be a multiple of the ranks. With ``loss``, scores stay cut by tokens of the vocabulary, and the loss of them must
    be ``F.cross_entropy``. Experts are not cut: each rank computes them for all tokens, and ``ep`` spreads them.
    """
    has_experts = any(True for _ in list_mixtures(model))
    to = "_to_sequence" if sequence else ""
    if loss:
        scores = "loss_of_sequence" if sequence else "loss"
    else:
        scores = "colwise_of_sequence_gathered" if sequence else "colwise_gathered"
    layer = "model.layers.*"
    styles: dict[str, ParallelStyle | str] = {
        "model.embed_tokens": f"embedding{to}",
        f"{layer}.self_attn.[qkv]_proj": "colwise",
        f"{layer}.self_attn.o_proj": f"rowwise{to}",
        "lm_head": scores,
    }
    if not has_experts:
        styles |= {f"{layer}.mlp.gate_proj": "colwise", f"{layer}.mlp.up_proj": "colwise"}
        styles |= {f"{layer}.mlp.down_proj": f"rowwise{to}"}
    if sequence:  # each layer gathers what it takes once, not in each of its products
        cut, whole = Shard(1), Replicate()
        styles |= {f"{layer}.input_layernorm": "sequence", f"{layer}.post_attention_layernorm": "sequence"}
        styles |= {
            "model.norm": "sequence",
            f"{layer}.self_attn": PrepareModuleInput(
                input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{layer}.mlp": PrepareModuleInputOutput(
                input_layouts=cut,
                desired_input_layouts=whole,
                use_local_input=True,
                output_layouts=whole,
                desired_output_layouts=cut,
            )
            if has_experts
            else PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole),
        }
    return styles


def make_rotation(positions: Tensor, config: LlamaConfig, dtype: torch.dtype) -> Rotation:
    """The angles by which pairs of a head's numbers turn at each position (Su et al. 2021), computed in fp32.

    They are made anew in each forward, in no time, so that there is no buffer to initialise, save or spread. With
    Llama 3's scaling, waves that are long against the context of the first training are stretched by ``factor``, short
    ones stay, and between the two it goes from one to the other.
    """
    pairs = torch.arange(0, config.head_width, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_width)
    if config.rope_scaling is not None:
        factor, low, high, context = (config.rope_scaling[name] for name in LLAMA3_SCALING)
        turns = context * frequencies / (2 * math.pi)  # in the context of the first training
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / factor
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (i, i + W / 2) of (B, heads, T, W): Hugging Face's pairs, by which its weights are ordered."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def mask_documents(documents: Tensor) -> Tensor:
    """(B, 1, T, T) bool: which key (last) a query may see; padding sees padding, so that no row is empty.

    With context parallelism queries are those of this rank's part, and keys all of the sequence.
    """
    keys = whole_sequence(documents)
    places = sequence_places(documents.shape[1], documents.device)
    before = places[:, None] >= torch.arange(keys.shape[1], device=keys.device)
    return ((documents[:, :, None] == keys[:, None, :]) & before)[:, None]


def read_documents(split: str, *, tokenizer: str, vocabulary: int, max_bytes: int) -> Iterator[dict[str, Tokens]]:
    """The functions, classes and other statements of the standard library's modules, a document each.

    Every tenth module is held out. ``tokenizer`` is the file of a byte-level BPE with ``vocabulary`` tokens; if
    missing, it is trained on the other modules and written.
    """
    bpe, texts = open_texts(split, tokenizer=tokenizer, vocabulary=vocabulary, max_bytes=max_bytes)
    for piece in (piece for text in texts for piece in re.split(r"\n{2,}(?=\S)", text) if piece.strip()):
        yield {"tokens": np.asarray(bpe.encode(piece).ids, dtype=np.uint16)}


def shift(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The batch of packed sequences, whose ``targets`` are each token's next one: a collate= for context parallelism.

    After it, SequenceCut can cut sequences along tokens, targets, position_ids and document_ids.
    """
    names = ("tokens", "position_ids", "document_ids", "loss_mask")
    whole = {name: torch.from_numpy(np.stack([row[name] for row in rows]).astype(np.int64)) for name in names}
    valid = torch.tensor([bool(row.get(VALID, True)) for row in rows])  # others fill the last batch
    counts = (whole["loss_mask"] != 0) & valid[:, None]
    targets = whole["tokens"].masked_fill(~counts, _NO_TARGET)[:, 1:]
    whole["document_ids"] = whole["document_ids"].masked_fill(~valid[:, None], _PADDING)
    return {name: whole[name][:, :-1] for name in names[:3]} | {"targets": targets}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all tokens that are predicted, and their number; experts may add an auxiliary loss."""
    scores, targets = _predict(model, batch)
    total = F.cross_entropy(scores, targets, ignore_index=_NO_TARGET, reduction="sum")
    auxiliary = [one.auxiliary_loss for _, one in list_mixtures(model) if one.auxiliary_loss is not None]
    return sum(auxiliary, total), (targets != _NO_TARGET).sum()


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Loss and accuracy of the next token."""
    scores, targets = _predict(model, batch)
    total, count = F.cross_entropy(scores, targets, ignore_index=_NO_TARGET, reduction="sum"), targets != _NO_TARGET
    return {"loss": (total, count.sum()), "accuracy": ((scores.argmax(1) == targets).sum(), count.sum())}


def _predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (B * T, vocab_size) fp32 and targets (B * T,) of packed sequences of T + 1 tokens, or of shifted ones."""
    if "targets" in batch:
        scores = model(batch["tokens"], batch["position_ids"], batch["document_ids"])
        return scores.flatten(0, 1).float(), batch["targets"].flatten()
    counts, documents = batch["loss_mask"], batch["document_ids"]
    if VALID in batch:  # rows that fill the last batch
        is_filled = ~batch[VALID][:, None]
        counts, documents = counts & ~is_filled, documents.masked_fill(is_filled, _PADDING)
    targets = batch["tokens"].masked_fill(~counts, _NO_TARGET)[:, 1:]
    scores = model(batch["tokens"][:, :-1], batch["position_ids"][:, :-1], documents[:, :-1])
    return scores.flatten(0, 1).float(), targets.flatten()


def _make_experts(config: LlamaConfig, experts: ExpertsConfig) -> MixtureOfExperts:
    std = config.initializer_range
    return MixtureOfExperts(config.hidden_size, config.intermediate_size, experts, std, _residual_std(config))


def _residual_std(config: LlamaConfig) -> float:
    """Smaller for what is added to the residual, so that its variance does not grow with the layers (GPT-2)."""
    return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
