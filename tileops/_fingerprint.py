"""Compiled code must never outlive its source.

torch's on-disk compile caches key on operator names, not on bodies, so a changed kernel would
be served from an old cache. The hash of every source and configuration file of the three packages
becomes part of the caches' key; what the user has set there is kept.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

MARK = "tileops-"


def source_hash() -> str:
    """Hash of the sources of tileops, meta_kernels and ops_registry."""
    import meta_kernels
    import ops_registry

    digest = hashlib.sha256()
    for file in (__file__, meta_kernels.__file__, ops_registry.__file__):
        assert file is not None
        root = Path(file).parent
        if not root.is_dir():  # imported from a zip file
            archive = next(parent for parent in root.parents if parent.is_file())
            digest.update(archive.read_bytes())
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extend_cache_key() -> None:
    """Append the source hash to torch.compiler.config.cache_key_tag, once."""
    tag = torch.compiler.config.cache_key_tag
    if MARK not in tag:
        torch.compiler.config.cache_key_tag = f"{tag}{MARK}{source_hash()}"
