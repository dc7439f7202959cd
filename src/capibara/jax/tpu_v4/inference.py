"""Inference at its documented names: a thin face of :mod:`capibara.serve`."""

from __future__ import annotations

from capibara.serve.inference_optimizer import InferenceChoice, TpuInferenceOptimizer
from capibara.serve.pipeline import InferencePipeline, create_inference_pipeline

__all__ = ["InferenceChoice", "InferencePipeline", "TpuInferenceOptimizer", "create_inference_pipeline"]
