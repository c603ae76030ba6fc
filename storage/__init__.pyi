"""What ``penstock.storage`` exports, imported when it is first used; names are added here alone."""

from .cache import CacheStore as CacheStore
from .errors import AccessDeniedError as AccessDeniedError
from .errors import CacheFullError as CacheFullError
from .errors import NotFoundError as NotFoundError
from .errors import ObjectChangedError as ObjectChangedError
from .errors import PenstockError as PenstockError
from .errors import ShortReadError as ShortReadError
from .errors import StorageError as StorageError
from .errors import StoreTimeoutError as StoreTimeoutError
from .errors import StoreUnavailableError as StoreUnavailableError
from .errors import StoreUnreachableError as StoreUnreachableError
from .errors import ThrottledError as ThrottledError
from .errors import UnsupportedURLError as UnsupportedURLError
from .local import LocalStore as LocalStore
from .memory import Call as Call
from .memory import Fault as Fault
from .memory import MemoryStore as MemoryStore
from .resolve import open_client as open_client
from .resolve import open_store as open_store
from .resolve import split_url as split_url
from .retry import RetryConfig as RetryConfig
from .retry import RetryStore as RetryStore
from .store import ByteRange as ByteRange
from .store import ObjectInfo as ObjectInfo
from .store import Store as Store
