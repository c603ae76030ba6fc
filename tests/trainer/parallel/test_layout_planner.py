"""The planner's arithmetic, against counts by hand and against what torch's engines send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.trainer.__main__ import main
from penstock.trainer.errors import RecipeError, TrainerConfigError
from penstock.trainer.parallel.activation import ActivationConfig
from penstock.trainer.parallel.config import ParallelConfig
from penstock.trainer.parallel.diloco_config import DilocoConfig
from penstock.trainer.parallel.meta import build_on_meta
from penstock.trainer.parallel.planned_parts import Work
from penstock.trainer.parallel.planner import plan_layout, propose_layouts
from penstock.trainer.parallel.precision import PrecisionConfig
from penstock.trainer.parallel.tensor import TensorPlan, spread_losses
from penstock.trainer.parallel.trace import trace_forward, trace_optimizer
from penstock.trainer.recipes.experts import ExpertsConfig
from penstock.trainer.recipes.llama import Llama, next_token_loss
from penstock.trainer.recipes.llama_config import LlamaConfig
from penstock.trainer.recipes.plan import read_memory

CONFIG = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
WIDTH, INNER, WORDS, LAYERS, LENGTH = 64, 128, 512, 4, 32
BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
NORMS = 2 * WIDTH
NUMBERS = LAYERS * (BLOCK + NORMS) + 2 * WORDS * WIDTH + WIDTH


def make_batch(rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, LENGTH + 1, dtype=torch.int64)
    counts = torch.ones(rows, LENGTH + 1, dtype=torch.bool)
    return {"tokens": tokens, "position_ids": tokens, "document_ids": tokens, "loss_mask": counts}


@pytest.fixture(scope="module")
def work() -> Work:
    torch.set_num_threads(1)
    model = build_on_meta(Llama, CONFIG)
    precision = PrecisionConfig(dtype="fp32")
    return Work(
        model=model,
        records=trace_forward(model, next_token_loss, make_batch, precision),
        optimizer=trace_optimizer(model, torch.optim.AdamW),
        precision=precision,
        activation=ActivationConfig(),
        rows=lambda replicas: 32 // replicas,
    )


@pytest.mark.slow
def test_a_replica_holds_everything(work: Work) -> None:
    (rank,) = plan_layout(work, ParallelConfig(), 4).ranks
    assert rank.parameters == NUMBERS
    assert (rank.weights, rank.gradients, rank.optimizer) == (4 * NUMBERS, 4 * NUMBERS, 8 * NUMBERS)


@pytest.mark.slow
def test_each_zero_stage_shards_more(work: Work) -> None:
    root, block = 2 * WORDS * WIDTH + WIDTH, BLOCK + NORMS
    plans = {zero: plan_layout(work, ParallelConfig(zero=zero), 4) for zero in (0, 1, 2, 3)}
    for zero in (1, 2, 3):
        (rank,) = plans[zero].ranks
        gathered = root + 2 * block if zero == 3 else NUMBERS + block  # the last one is copied
        assert rank.optimizer == 8 * NUMBERS / 4
        assert rank.weights == 4 * (NUMBERS / 4 + gathered)
        assert rank.gradients == 4 * ((NUMBERS - root) / 4 + 2 * root)  # the root's are copied to be scattered
    ring = 3 / 4 * 4 * NUMBERS
    assert [plans[zero].wire["dp"] / ring for zero in (0, 1, 2, 3)] == pytest.approx([2, 2, 2, 3])


def test_learners_send_little_and_keep_outer_weights_and_momenta(work: Work) -> None:
    config = ParallelConfig(mode="diloco", diloco=DilocoConfig(learners=2, every=10))
    inside, apart = plan_layout(work, ParallelConfig(), 2), plan_layout(work, config, 4)
    assert inside.wire["dp"] == pytest.approx(4 * NUMBERS)  # a ring of two ranks sends what it sums once
    assert apart.wire["dp"] == pytest.approx(4 * NUMBERS * (1 + 1 / 2 / 10))  # and each, now and then, its half
    assert apart.worst.optimizer == pytest.approx(inside.worst.optimizer + 2 * 4 * NUMBERS)


def test_microbatches_gather_again_but_with_zero_1(work: Work) -> None:
    twice = replace(work, accumulate=2)
    sent = [plan_layout(twice, ParallelConfig(zero=zero), 4).wire["dp"] for zero in (0, 1, 2, 3)]
    assert [one / (3 / 4 * 4 * NUMBERS) for one in sent] == pytest.approx([2, 2, 4, 6])
    (rank,) = plan_layout(twice, ParallelConfig(zero=1), 4).ranks
    assert rank.gradients == 4 * (NUMBERS + BLOCK + NORMS)


def test_tensor_parallelism_cuts_matrices_and_leaves_norms(work: Work) -> None:
    plan = plan_layout(work, ParallelConfig(tp=2), 2)
    assert plan.worst.parameters == LAYERS * (BLOCK // 2 + NORMS) + WORDS * WIDTH + WIDTH
    # In and out of attention and feed-forward, both ways, embedding and scores; and numbers of each token's loss.
    activation = 4 * 32 * LENGTH * WIDTH
    exchanged = 0.5 * activation * (LAYERS * 8 + 2 + 2) + 0.5 * 6 * 4 * 32 * LENGTH
    assert plan.wire["tp"] == exchanged + 2 * 0.5 * 4 * (LAYERS * NORMS + WIDTH)
    assert plan.worst.activations < 0.65 * plan_layout(work, ParallelConfig(), 1).worst.activations


def test_stages_share_parameters_and_send_borders(work: Work) -> None:
    plan = plan_layout(work, ParallelConfig(pp=2, microbatches=8), 2)
    assert sum(one.parameters for one in plan.ranks) == NUMBERS
    assert plan.bubble == pytest.approx(1 / 9)
    assert plan.wire["pp"] == 4 * 32 * LENGTH * WIDTH  # each sends all rows once: values, or their gradients
    whole = plan_layout(work, ParallelConfig(), 1).worst.activations
    assert plan.worst.activations < whole / 4


def test_cut_stages_send_parts_of_sequences(work: Work) -> None:
    staged, cut = (plan_layout(work, ParallelConfig(pp=2, microbatches=8, tp=tp), 2 * tp) for tp in (1, 2))
    assert cut.wire["pp"] == staged.wire["pp"] / 2
    assert 0 < cut.wire["tp"] < plan_layout(work, ParallelConfig(tp=2), 2).wire["tp"]
    assert 2 * sum(one.parameters for one in cut.ranks) == NUMBERS + LAYERS * NORMS + WIDTH


@pytest.mark.slow
def test_rows_travel_to_experts_and_back() -> None:
    config = replace(CONFIG, experts=ExpertsConfig(num_experts=4, num_experts_per_tok=2))
    model = build_on_meta(Llama, config)
    precision = PrecisionConfig(dtype="fp32")
    work = Work(
        model=model,
        records=trace_forward(model, next_token_loss, make_batch, precision),
        optimizer=trace_optimizer(model, torch.optim.AdamW),
        precision=precision,
        activation=ActivationConfig(),
        rows=lambda replicas: 32 // replicas,
    )
    (alone,), plan = plan_layout(work, ParallelConfig(), 2).ranks, plan_layout(work, ParallelConfig(ep=2), 2)
    experts = LAYERS * 4 * 3 * WIDTH * INNER
    assert alone.parameters - plan.worst.parameters == experts / 2
    rows = 16 * LENGTH * 2  # each token has two experts
    assert plan.wire["ep"] == LAYERS * 0.5 * (4 * rows * WIDTH * 4 + 4 * 8)  # both ways, and their gradients; counts
    assert plan.wire["dp"] == 4 * (alone.parameters - experts) + LAYERS * 4 * 4  # of the others, and the biases


def test_recomputed_blocks_keep_their_inputs(work: Work) -> None:
    whole = plan_layout(work, ParallelConfig(), 1).worst.activations
    again = plan_layout(replace(work, activation=ActivationConfig(every=1)), ParallelConfig(), 1).worst.activations
    assert again < 0.7 * whole


@pytest.mark.slow
def test_layouts_that_fit_come_with_reasons(work: Work) -> None:
    needs = plan_layout(work, ParallelConfig(), 4).worst.total
    found = propose_layouts(work, ParallelConfig(), 4, needs)
    assert (4, 1, 1) in {(one.plan.sizes.dp, one.plan.sizes.tp, one.plan.sizes.pp) for one in found}
    assert "least time" in found[0].reason
    times = [one.plan.seconds_by_row for one in found]
    assert times == sorted(times)
    assert all(one.plan.worst.total <= needs for one in found)
    assert propose_layouts(work, ParallelConfig(), 4, 1000.0) == []


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        ({"tp": 2}, 3, "not a multiple"),
        ({"tp": 8}, 8, "parallel.tp=8 does not divide"),
        ({"pp": 2, "cp": 2}, 4, "parallel.pp=2 with parallel.cp=2 is not there yet"),
        ({"pp": 2, "ep": 2}, 4, "parallel.pp=2 with parallel.ep=2 is not there yet"),
        ({"pp": 16, "microbatches": 16}, 16, "parallel.pp"),
        ({"pp": 2, "microbatches": 5}, 2, "parallel.microbatches=5 does not divide the 32 rows"),
        ({"ep": 2}, 2, "the model has none"),
    ],
)
def test_layouts_that_cannot_be_are_refused(work: Work, options: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(TrainerConfigError, match=said):
        plan_layout(work, ParallelConfig(**options), ranks)


def test_sizes_are_read() -> None:
    assert read_memory("80GiB") == 80 * 2**30
    assert read_memory("1.5 GB") == 1.5e9
    for text in ("many", "80XB", "", "0GiB", "-1GiB"):
        with pytest.raises(RecipeError, match="--memory"):
            read_memory(text)


@pytest.mark.slow
def test_a_plan_starts_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.trainer.__main__.open_world", lambda **_: pytest.fail("a world was opened"))
    assert main(["llama", "--plan", "--ranks=4", "--memory=1GiB"]) == 0
    out = capsys.readouterr().out
    assert "1,000,576" in out
    assert "best first" in out
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert main(["llama", "--plan", "--memory=lots"]) == 2
    assert "--memory='lots' is not a size" in capsys.readouterr().err


class Sent(TorchDispatchMode):
    """Adds up what a rank of a ring sends."""

    def __init__(self) -> None:
        super().__init__()
        self.by_ranks: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # until it comes to the parts
        name = func._schema.name
        result = func(*args, **(kwargs or {}))
        if name.startswith("c10d::"):
            group = next(one for one in args if isinstance(one, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            whole = max(_bytes_of(one) for one in args)
            times = 2 if "allreduce" in name else 1
            self.by_ranks[ranks] = self.by_ranks.get(ranks, 0.0) + times * (1 - 1 / ranks) * whole
        elif name.startswith("_c10d_functional::") and isinstance(args[-1], str):
            ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            whole = max(_bytes_of(args[0]), _bytes_of(result))
            times = 2 if "all_reduce" in name else 1
            self.by_ranks[ranks] = self.by_ranks.get(ranks, 0.0) + times * (1 - 1 / ranks) * whole
        return result


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0


@contextmanager
def pretended_ranks(count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_are_those_that_the_engines_send(work: Work, tp: int) -> None:
    config = ParallelConfig(zero=3, tp=tp)
    ranks = 4 * tp
    with pretended_ranks(ranks):
        mesh = init_device_mesh("cpu", (4, tp), mesh_dim_names=("dp", "tp"))
        model = Llama(CONFIG)
        plan = TensorPlan(model, config) if tp > 1 else None
        if plan is not None:
            plan.cut(mesh["tp"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
        with Sent() as sent, spread_losses(plan):
            total, _ = next_token_loss(model, make_batch(8))
            (total.full_tensor() if isinstance(total, DTensor) else total).backward()
    planned = plan_layout(work, config, ranks)
    assert planned.rows == 8
    assert sent.by_ranks[4] == pytest.approx(planned.wire["dp"], rel=0.001)
    if tp > 1:
        assert sent.by_ranks[2] == pytest.approx(planned.wire["tp"], rel=0.001)
