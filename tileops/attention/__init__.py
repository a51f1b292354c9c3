"""The thirteen attention operators. Construct once, then call with tensors."""

from tileops.attention.paged_kv_cache_write import PagedKVCacheWriteFwdOp

__all__ = ["PagedKVCacheWriteFwdOp"]
