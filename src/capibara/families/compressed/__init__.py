"""Folders of quantized weights in the form of ``compressed-tensors``, which vLLM and transformers load."""

from __future__ import annotations
