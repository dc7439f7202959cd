"""GGUF, the files of llama.cpp: read without another package, written through the package ``gguf``.

:mod:`~capibara.families.gguf.file` reads a header, :mod:`~capibara.families.gguf.blocks` decodes blocks,
:mod:`~capibara.families.gguf.names` and :mod:`~capibara.families.gguf.settings` say which tensor and which key is what,
:mod:`~capibara.families.gguf.tokens` handles tokenizers.
"""

from __future__ import annotations

from capibara.families.gguf.file import GgufFile, is_gguf

__all__ = ["GgufFile", "is_gguf"]
