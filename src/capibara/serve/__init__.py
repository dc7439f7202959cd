"""Serving: generate text with a trained model, and make vectors of texts.

:class:`Generator` writes text from a model's parameters, one token at a time, with a cache; :class:`Sampling` sets
how the next token is chosen. :class:`Embedder` makes a vector of each text. :class:`Engine` writes many texts at once,
for requests that come at any time, and :func:`create_inference_pipeline` makes one whose sizes are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.data import Utf8Stream
from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.serve.embed import Embedder
    from capibara.serve.engine import AdapterRoom, Engine, Speculation
    from capibara.serve.generate import Generator
    from capibara.serve.inference_optimizer import InferenceChoice, TpuInferenceOptimizer
    from capibara.serve.load import find_checkpoint, load_model
    from capibara.serve.loaded import LoadedModel
    from capibara.serve.pipeline import InferencePipeline, create_inference_pipeline
    from capibara.serve.requests import (
        EngineClosedError,
        EngineStatistics,
        Grammar,
        Piece,
        QueueFullError,
        Request,
        RequestError,
        ServeError,
        Stream,
        TokenScore,
    )
    from capibara.serve.sampling import Sampling, keep_top_k, keep_top_p, sample
    from capibara.serve.weights import load_compressed

__all__ = [
    "AdapterRoom",
    "Embedder",
    "Engine",
    "EngineClosedError",
    "EngineStatistics",
    "Generator",
    "Grammar",
    "InferenceChoice",
    "InferencePipeline",
    "LoadedModel",
    "Piece",
    "QueueFullError",
    "Request",
    "RequestError",
    "Sampling",
    "ServeError",
    "Speculation",
    "Stream",
    "TokenScore",
    "TpuInferenceOptimizer",
    "Utf8Stream",
    "create_inference_pipeline",
    "find_checkpoint",
    "keep_top_k",
    "keep_top_p",
    "load_compressed",
    "load_model",
    "sample",
]

_HOMES = {
    "embed": ("Embedder",),
    "engine": (
        "AdapterRoom",
        "Engine",
        "Speculation",
    ),
    "generate": ("Generator",),
    "inference_optimizer": (
        "InferenceChoice",
        "TpuInferenceOptimizer",
    ),
    "load": ("find_checkpoint", "load_model"),
    "loaded": ("LoadedModel",),
    "pipeline": (
        "InferencePipeline",
        "create_inference_pipeline",
    ),
    "requests": (
        "EngineClosedError",
        "EngineStatistics",
        "Grammar",
        "Piece",
        "QueueFullError",
        "Request",
        "RequestError",
        "ServeError",
        "Stream",
        "TokenScore",
    ),
    "sampling": (
        "Sampling",
        "keep_top_k",
        "keep_top_p",
        "sample",
    ),
    "weights": ("load_compressed",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
