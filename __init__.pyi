"""What ``penstock`` exports, imported when it is first used; names are added here alone."""

from . import loader as loader
from . import storage as storage
from . import trainer as trainer
from .loader import ArrowFormat as ArrowFormat
from .loader import Bucket as Bucket
from .loader import Cost as Cost
from .loader import DistributedDataLoader as DistributedDataLoader
from .loader import ImageDecoder as ImageDecoder
from .loader import JsonlFormat as JsonlFormat
from .loader import LoaderMetrics as LoaderMetrics
from .loader import Manifest as Manifest
from .loader import MdsFormat as MdsFormat
from .loader import Mixture as Mixture
from .loader import Packing as Packing
from .loader import ParquetFormat as ParquetFormat
from .loader import SequenceCut as SequenceCut
from .loader import Source as Source
from .loader import Subset as Subset
from .loader import TarFormat as TarFormat
from .loader import TokenBudget as TokenBudget
from .loader import TokenDocumentsFormat as TokenDocumentsFormat
from .loader import TokensFormat as TokensFormat
from .loader import audit as audit
from .loader import open_manifest as open_manifest
from .loader import pack as pack
from .loader import show as show
from .loader import verify as verify
from .storage import PenstockError as PenstockError
from .storage import open_store as open_store

__version__: str
