"""One rule of mixed precision at every zero stage: what autocast makes of a model, and of the loss around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from penstock.trainer import (
    ArrayLoader,
    Callbacks,
    Evaluation,
    StepRecord,
    TrainerConfigError,
    World,
    close_world,
    open_world,
)

ROWS, WIDTH, STEPS = 32, 8, 3


def turn(position: Tensor) -> Tensor:
    """A sine of (n,) positions, (n, WIDTH)."""
    return torch.sin(position[:, None] * torch.linspace(0.5, 2.0, WIDTH).to(position.device))


@pytest.fixture(autouse=True)
def slow_path() -> Iterator[None]:
    """On CPUs torch's own attention takes another path in evaluation, whose rounding is its own."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Blocks(nn.Module):
    """A stack of blocks between two layers; ``handed`` is what each block gets beside the stream."""

    def __init__(self, *blocks: nn.Module, features: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 1)

    def run(self, x: Tensor, *handed: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *handed)
        return self.last(x)[..., 0]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.run(batch["x"])


class Turned(nn.Module):
    """Adds a sine of positions that it is handed, as rotary angles are."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.line(x + turn(position).to(x.dtype))


class Timed(Blocks):
    def __init__(self) -> None:
        super().__init__(Turned(), Turned())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.run(turn(batch["time"]), batch["time"])


class Normalised(nn.Module):
    """A buffer that meets a layer: a mean to normalise with, far from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((WIDTH,), 1000.0))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(batch["far"] - self.mean)[:, 0]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attend(y, y, y, attn_mask=mask)[0]


class Masked(Blocks):
    """Attention with an additive mask: distances, as ALiBi has them, and the future at -inf."""

    def __init__(self) -> None:
        super().__init__(Attending(), Attending())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        places = torch.arange(4.0)
        mask = -1.234 * (places[:, None] - places).abs() + torch.triu(torch.full((4, 4), -torch.inf), 1)
        return self.run(batch["rows"], mask.to(batch["rows"].device)).mean(1)


class Encoded(nn.Module):
    """Torch's own layers of a transformer, behind a learned lookup whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 4, WIDTH))
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=one) for one in (True, False)
        ]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.words(batch["words"]) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp((1, 2))


class Norms(nn.Module):
    """Every kind of norm on what a convolution gives, and on an fp32 stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 4, 3, padding=1)
        kinds = (nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True), nn.LayerNorm(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.Conv1d(4, 4, 1)) for one in kinds)
        self.streams = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])
        self.up = nn.ConvTranspose1d(4, 2, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        stream = batch["rows"] * 100.0 + 3.0
        for norm in self.streams:
            stream = norm(stream) + stream
        x = self.first(stream)
        for block in self.blocks:
            x = x + block(x)
        return self.up(x).sum((1, 2))


class Scaled(nn.Module):
    """Parameters in fp32 arithmetic: a trained scale, frozen frequencies (Gaussian Fourier features), a decay."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.linspace(10.0, 300.0, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.1, 1.0, WIDTH))
        self.decay = nn.Parameter(torch.full((1, WIDTH), -0.01))
        self.blocks = nn.ModuleList([Turned()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.sin(batch["x"][:, :1] * self.frequencies) * self.scale
        x = x * torch.exp(batch["time"][:, None] * self.decay)
        for block in self.blocks:
            x = block(x, batch["time"])
        return self.last(x)[:, 0]


class Judging(Blocks):
    """Computes its loss in forward, of targets far from 0 that it is handed."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.run(batch["x"]) + 1000.0 - batch["far"][:, 0]).square()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)])
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.pair = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["rows"]
        for block in self.blocks:
            x = block(x)[0].float()
        return self.pair(self.cell(x[:, -1].float()).float(), batch["x"])[:, 0]


class Weighed(nn.Module):
    """Layers whose weights are made of others in forward, and own subclasses of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Standardised(WIDTH, WIDTH)])
        self.slope = nn.PReLU()
        self.bag = nn.EmbeddingBag(16, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = self.slope(block(x))
        return x.sum(1) + self.bag(batch["words"])[:, 0]


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight - self.weight.mean()) / self.weight.std(), self.bias)


class Experts(nn.Module):
    """Matrix products with bare weights."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.bmm(x.expand(2, -1, -1), self.into).sum(0)


class Exact(nn.Module):
    """A head that leaves autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(batch["x"].device.type, enabled=False):
            return self.head(batch["x"].float())[:, 0]


class Wide(nn.Module):
    """A part in float64, which autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.blocks[0](batch["x"].double()).float())[:, 0]


ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "timed": (Timed, {}),
    "buffer": (Normalised, {}),
    "masked": (Masked, {}),
    "encoded": (Encoded, {}),
    "norms": (Norms, {}),
    "scaled": (Scaled, {}),
    "judging": (lambda: Judging(Experts(), Experts()), {}),
    "recurrent": (Recurrent, {}),
    "weighed": (Weighed, {}),
    "wide": (Wide, {}),
    "rounded": (lambda: Blocks(Experts(), Experts()), {"precision": {"rounded_modules": ["Experts"]}}),
    "exact": (Exact, {"precision": {"fp32_modules": ["Exact"]}}),
    "recomputed": (Timed, {"activation": {"every": 1}}),
    "accumulated": (Encoded, {"step": {"accumulate": 2}, "ema": {"decay": 0.9}}),
    "compiled": (Timed, {"compile": {"enabled": True, "backend": "aot_eager"}}),
}


def make_data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return {
        "x": x,
        "far": x + 1000.0,
        "rows": torch.randn(ROWS, 4, WIDTH, generator=generator),
        "time": torch.arange(900.0, 900.0 + ROWS),
        "words": torch.randint(0, 16, (ROWS, 4), generator=generator),
        "y": torch.sin(torch.arange(900.0, 900.0 + ROWS)),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Not of torch's own losses, which autocast knows."""
    return (model(batch) - batch["y"]).abs().sum(), len(batch["y"])


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"error": loss(model, batch)}


class Losses(Callbacks):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        self.found.append(record.loss)


def train(world: World, folder: str, name: str, dtype: str, zero: int) -> tuple[list[float], float, dict[str, Tensor]]:
    """The losses of the steps on rank 0, then a metric, and the weights and buffers."""
    make, options = {**ZOO, **OTHERS}[name]
    torch.manual_seed(0)
    model, losses, data = make(), Losses(), make_data()
    for parameter in model.parameters():  # away from what both formats have alike, such as 1
        parameter.data.mul_(1.001)
    with make_trainer(
        world,
        f"{folder}/{name}-{dtype}-{zero}",
        ArrayLoader(data, global_batch_size=16, rank=world.rank, world_size=world.world_size),
        model,
        loss=loss,
        evaluation=Evaluation(batches=[data], metrics=measure),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        observers=[losses],
        steps=STEPS,
        **options
        | {
            "parallel": {"zero": zero, "unused_parameters": not zero and name == "skipping"},
            "precision": {"dtype": dtype, "init_scale": 1024.0, **options.get("precision", {})},
        },
    ) as trainer:
        trainer.train()
        metric = trainer.evaluate()["error"]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in state.items()}
    return losses.found, metric, {key: one.detach() for key, one in whole.items()}


def compare(world: World, folder: str, name: str, dtype: str, tolerance: float = 1e-6) -> None:
    losses, metric, weights = train(world, folder, name, dtype, 0)
    for zero in (1, 2, 3):
        others, other, found = train(world, folder, name, dtype, zero)
        assert others == pytest.approx(losses, rel=tolerance), (name, zero)
        assert other == pytest.approx(metric, rel=tolerance), (name, zero)
        torch.testing.assert_close(found, weights, rtol=tolerance, atol=tolerance)


HALF = [("bf16", name) for name in ZOO] + [("fp16", name) for name in ("timed", "masked", "norms", "scaled", "judging")]


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("dtype", "name"), HALF)
def test_every_zero_stage_computes_what_autocast_makes_of_the_model(
    world: World, tmp_path: Path, name: str, dtype: str
) -> None:
    compare(world, str(tmp_path), name, dtype)


def compare_some(world: World, folder: str) -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    for name in ("timed", "norms", "encoded", "skipping"):
        compare(world, folder, name, "bf16")


def test_so_do_several_ranks(tmp_path: Path) -> None:
    """Which add up gradients in fp32, also of parameters that one of them does not use."""
    run_ranks(compare_some, 2, str(tmp_path))


def train_plainly(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> dict[str, Tensor]:
    """The textbook's loop under torch's autocast."""
    torch.manual_seed(0)
    model, data = ZOO[name][0](), make_data()
    for parameter in model.parameters():
        parameter.data.mul_(1.001)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=dtype == torch.float16)
    loader = ArrayLoader(data, global_batch_size=16, rank=0, world_size=1)
    for batch in islice(chain.from_iterable(repeat(loader)), STEPS):
        there = {key: values.to(device) for key, values in batch.items()}
        with torch.autocast(device, dtype):
            total, count = loss(model, there)
        scaler.scale(total / count).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {key: one.detach() for key, one in model.named_parameters()}


@pytest.mark.parametrize("name", ["timed", "scaled", "norms"])
def test_that_is_what_a_plain_loop_under_autocast_computes(world: World, tmp_path: Path, name: str) -> None:
    expected = train_plainly(name)
    _, _, found = train(world, str(tmp_path), name, "bf16", 3)
    torch.testing.assert_close({key: found[key] for key in expected}, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture
def cuda_world(settled_imports: None) -> Iterator[World]:
    """A world of one on a GPU, whose collectives are NCCL's."""
    yield open_world(device="cuda")
    close_world()


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(("dtype", "name"), [pytest.param(*one, marks=CUDA) for one in HALF])
def test_every_zero_stage_computes_on_cuda_what_autocast_makes_of_the_model(
    cuda_world: World, tmp_path: Path, name: str, dtype: str
) -> None:
    compare(cuda_world, str(tmp_path), name, dtype, tolerance=1e-4)


@pytest.mark.parametrize(
    ("dtype", "name", "zero"),
    [
        pytest.param(dtype, name, zero, marks=CUDA)
        for dtype in FORMATS
        for name in ("timed", "scaled", "norms", "masked")
        for zero in (0, 3)
    ],
)
def test_that_is_what_a_plain_loop_under_autocast_computes_on_cuda(
    cuda_world: World, tmp_path: Path, name: str, dtype: str, zero: int
) -> None:
    expected = train_plainly(name, FORMATS[dtype], "cuda")
    _, _, found = train(cuda_world, str(tmp_path), name, dtype, zero)
    torch.testing.assert_close({key: found[key] for key in expected}, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_layer_outside_of_autocast_is_refused_with_the_option_that_helps(
    world: World, tmp_path: Path, zero: int
) -> None:
    with pytest.raises(TrainerConfigError, match=r"Float and BFloat16\)\. .* precision\.fp32_modules"):
        train(world, str(tmp_path), "leaving", "bf16", zero)


@pytest.mark.parametrize("key", ["fp32_modules", "rounded_modules"])
def test_a_class_that_the_model_has_not_is_refused_by_name(world: World, tmp_path: Path, key: str) -> None:
    precision = {"dtype": "bf16", key: ["Lin"]}
    with pytest.raises(TrainerConfigError, match=rf"precision\.{key}='Lin' .*did you mean 'Line'"):
        make_trainer(world, str(tmp_path), precision=precision, parallel={"zero": 3})


class Seen(nn.Module):
    """Notes the formats of its weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.line = nn.Linear(WIDTH, 1)
        self.own = Experts()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.formats = {name.split(".")[0]: one.dtype for name, one in self.named_parameters()}
        return self.line(self.own(self.norm(self.words(batch["words"] % 4)).mean(1)))[:, 0]


@pytest.mark.parametrize("given", [{}, {"rounded_modules": ["Experts"], "fp32_modules": ["Linear"]}])
def test_weights_of_matrix_products_alone_are_gathered_rounded(
    world: World, tmp_path: Path, given: dict[str, list[str]]
) -> None:
    model, precision = Seen(), {"dtype": "bf16", **given}
    loader = ArrayLoader(make_data(), global_batch_size=16)
    with make_trainer(
        world, str(tmp_path), loader, model, loss=loss, precision=precision, parallel={"zero": 3}
    ) as trainer:
        trainer.train()
    half = "own" if given else "line"
    assert {name for name, dtype in model.formats.items() if dtype == torch.bfloat16} == {half}


class Viewing(nn.Module):
    """A block that returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.line(x)
        return y.view(-1, 2, WIDTH // 2).flatten(1), {"also": (x + 1.0)[:, :1]}


class Written(nn.Module):
    """Writes in place to what its blocks return, and returns a view itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Viewing(), Viewing()])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x, named = block(x)
            x += batch["time"][:, None] / 1000
            x = x * named["also"].mul_(0.5)
        return x.sum(1, keepdim=True)[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_sharded_modules_return_may_be_a_view_and_written_to(world: World, tmp_path: Path, dtype: str) -> None:
    compare(world, str(tmp_path), "written", dtype)


class Spinning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["x"] * self.turn).abs().sum(1)


def train_complex(world: World, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(world, folder, "spinning", "fp32", 0)


def test_complex_weights_are_trained_without_a_warning(tmp_path: Path) -> None:
    run_ranks(train_complex, 2, str(tmp_path))


def flatten(layer: nn.RNNBase) -> None:
    """What a recurrent layer does on CUDA with weights that it has not seen before."""
    weights = layer._flat_weights
    parts = torch.cat([one.detach().flatten() for one in weights]).split([one.numel() for one in weights])
    with torch.no_grad():
        for one, part in zip(weights, parts, strict=True):
            one.set_(part.view(one.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recurrent_layers_compute_with_the_weights_that_are_gathered(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    compare(world, str(tmp_path), "recurrent", dtype)


class Skipping(Blocks):
    """A layer that rank 1 does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.norm(self.first(batch["x"]))
        return self.last(x if torch.distributed.get_rank() else x + self.other(x))[:, 0]


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "leaving": (Exact, {}),
    "written": (Written, {}),
    "spinning": (Spinning, {}),
    "skipping": (Skipping, {}),
}
