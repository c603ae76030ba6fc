"""What ``penstock.loader.integrations`` exports; a framework is imported when a name that needs it is first used."""

from .accelerate import AccelerateLoader as AccelerateLoader
from .lightning import LightningCallback as LightningCallback
from .torch_loader import TorchLoader as TorchLoader
from .torchdata import LoaderNode as LoaderNode
from .torchtitan import TorchtitanLoader as TorchtitanLoader
from .transformers import TransformersCallback as TransformersCallback
