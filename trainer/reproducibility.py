"""Reproducible runs: random numbers by arithmetic, so that a resumed run draws the same, and deterministic kernels."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from .errors import TrainerConfigError

Purpose = Literal["step", "fetch", "evaluation"]
_PURPOSES: dict[Purpose, tuple[int, ...]] = {"step": (), "fetch": (1,), "evaluation": (2,)}

Generator = (
    np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random | torch.Generator | ModuleType
)
"""What numbers are drawn from; the modules ``numpy.random`` and ``random`` are their global generators."""

_KINDS = (
    *(np.random.Generator, np.random.BitGenerator, np.random.RandomState),
    *(random.Random, torch.Generator),
)
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")
_MOST_ITEMS = 100  # a longer list or dict holds data
_MT19937_BYTES = 2500  # 624 words, and the position in them


def seed_all(seed: int) -> None:
    """Seed torch's (on every device), NumPy's and Python's global generators: for weights, before a model is built."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_step(seed: int, step: int, rank: int, device: torch.device, purpose: Purpose = "step") -> None:
    """Seed torch's, NumPy's and Python's global generators for what this rank draws in this step.

    Fetching and evaluating have seeds of their own: how much a loader draws changes no dropout.
    """
    mixed = hash((seed, step, rank, *_PURPOSES[purpose])) & 0x7FFFFFFFFFFFFFFF
    # torch.manual_seed formats three stack traces where CUDA is not in use: a third of a millisecond a step.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def tell_seed(seed: int, saved: Mapping[str, Any] | None, tell: Callable[[str], None]) -> None:
    """Tell of a seed that a checkpoint's run had otherwise."""
    if saved and saved.get("seed", seed) != seed:
        tell(f"seed={seed}; the checkpoint had {saved['seed']}")


class GeneratorStates:
    """States of NumPy's and Python's global generators and of those ``held``, to be restored for code that runs again.

    Torch's global ones are not among them.
    """

    def __init__(self, held: Iterable[Generator] = ()) -> None:
        self._global: list[tuple[Generator, Any]] = [(np.random, _NUMPY.read()), (random, random.getstate())]
        self._held = [(one, _read(one)) for one in {id(one): one for one in held}.values()]

    def forget_unused(self) -> None:
        """Forget the global ones that were not drawn from since: most code draws from neither."""
        now = (_NUMPY.read(), random.getstate())
        used = (now[0] is not self._global[0][1], now[1] != self._global[1][1])
        self._global = [one for one, is_used in zip(self._global, used, strict=True) if is_used]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this, draws are those that followed the moment; after it, generators stand where they stood."""
        kept = [*self._global, *self._held]
        before = [(one, _read(one)) for one, _ in kept]
        try:
            for one, state in kept:
                _write(one, state)
            yield
        finally:
            for one, state in before:
                _write(one, state)


def find_generators(values: Iterable[object]) -> Iterator[Generator]:
    """The generators among ``values``, and in lists, tuples and dicts of them."""
    for value in values:
        if isinstance(value, _KINDS):
            yield value
        elif isinstance(value, list | tuple | dict) and len(value) <= _MOST_ITEMS:
            items = value.values() if isinstance(value, dict) else value
            yield from (one for one in items if isinstance(one, _KINDS))


class _NumpyGlobal:
    """Reads the state of NumPy's global generator, which takes 50 us, again only where it may have changed.

    The same object twice means that nothing was drawn in between.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Mapping[str, Any]] | None = None

    def read(self) -> Mapping[str, Any]:
        bits = _read_bits()
        # A second normal number is kept beside the bits, and its use does not change these.
        if bits is None or self._known is None or self._known[0] != bits or self._known[1]["has_gauss"]:
            self._known = (bits or b"", np.random.get_state(legacy=False))
        return self._known[1]


_NUMPY = _NumpyGlobal()


def _read_bits() -> bytes | None:
    """The memory of NumPy's global bit generator, or None where it was exchanged for one of another kind."""
    bits = np.random.get_bit_generator()
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _read(one: Generator) -> Any:
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    if isinstance(one, np.random.BitGenerator):
        return one.state
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.random.RandomState) or one is np.random:
        return one.get_state(legacy=False)
    return one.getstate()


def _write(one: Generator, state: Any) -> None:
    if isinstance(one, np.random.Generator):
        one.bit_generator.state = state
    elif isinstance(one, np.random.BitGenerator):
        one.state = state
    elif isinstance(one, torch.Generator | np.random.RandomState) or one is np.random:
        one.set_state(state)
    else:
        one.setstate(state)


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Within this torch takes deterministic kernels, and cuDNN measures none against each other; then as before.

    Raises:
        TrainerConfigError: the environment keeps cuBLAS from it; or an operation has no deterministic kernel.
    """
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(_WORKSPACE, _FIXED_WORKSPACES[0])  # cuBLAS reads it when it is first used
    if workspace not in _FIXED_WORKSPACES:
        raise TrainerConfigError(
            f"deterministic=True with {_WORKSPACE}={workspace!r} in the environment: sums in cuBLAS may differ "
            f"from run to run; set {_WORKSPACE}={_FIXED_WORKSPACES[0]}"
        )
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    except RuntimeError as exc:
        if "deterministic" not in str(exc):
            raise
        raise TrainerConfigError(
            "deterministic=True: an operation has no deterministic kernel on this device; replace it, or set "
            f"deterministic=False. Torch says: {str(exc).splitlines()[0]}"
        ) from exc
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, cudnn.deterministic = cudnn_before
