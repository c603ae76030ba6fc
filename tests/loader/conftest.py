"""Fixtures that this folder's tests share with others."""

from fake_hub import hub
from loader_fixtures import memory_store, own_index_cache, put_shards

__all__ = ["hub", "memory_store", "own_index_cache", "put_shards"]
