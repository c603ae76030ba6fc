"""Accelerate: the loader on the accelerator's device, known to its gradient accumulation and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .torch_loader import TorchLoader

if TYPE_CHECKING:
    from ..data_loader import DistributedDataLoader

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState
    from accelerate.utils import send_to_device
except ImportError as exc:
    raise ImportError("AccelerateLoader needs accelerate; install penstock[integrations]") from exc


class AccelerateLoader(DataLoaderStateMixin, TorchLoader):  # type: ignore[misc]
    """The loader for ``accelerator.prepare``, which neither shards it again nor copies what is on the device already.

    Batches come on the accelerator's device. ``accelerator.accumulate`` takes a step at the epoch's last batch, however
    many are left over. ``accelerator.save_state`` and ``load_state`` cover a prepared loader; leave
    ``register_for_checkpointing`` away then. ``skip_first_batches`` goes to a batch without reading those before it.
    """

    use_stateful_dataloader = True  # what makes save_state and load_state ask for state

    def __init__(self, loader: DistributedDataLoader[Any], accelerator: Accelerator) -> None:
        super().__init__(loader)
        self.device = accelerator.device
        self.gradient_state = GradientState()

    def _begin(self) -> Iterator[Any]:
        batches = super()._begin()
        self.begin()
        try:
            for batch in batches:
                self.end_of_dataloader = self.loader.steps_left == 0
                yield send_to_device(batch, self.device)
        finally:
            self.end()
