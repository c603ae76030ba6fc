"""Fixtures that this folder's tests share with others."""

from loader_fixtures import memory_store, own_index_cache, put_shards

__all__ = ["memory_store", "own_index_cache", "put_shards"]
