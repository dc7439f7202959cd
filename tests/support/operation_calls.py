"""A small call of every public function of ``capibara.ops``, and what a program says of the operations in it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from capibara import ops
from capibara.ops import attention, vq

__all__ = ["CALLS", "NEED_AXIS", "called", "custom_calls", "functions", "inside_one_device", "named"]


def f(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_HEADS = f(1, 2, 128, 16)
_PAGES = f(4, 8, 2, 16)
_INTEGERS = f(2, 2, dtype=jnp.int32)
_LENGTHS = f(2, dtype=jnp.int32)
_LAYER: dict[str, Any] = {"embed_dim": 32, "num_heads": 2}


def _params() -> Any:
    return jax.eval_shape(lambda: attention.multihead_attention_params(jax.random.key(0), **_LAYER))


def _codebooks(several: int | None = None) -> Any:
    dim = 16 if several is None else 8
    return jax.eval_shape(lambda: vq.initial_codebook_state(jax.random.key(0), 32, dim, codebooks=several))


def _call(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "attention.flash_attention": _call(_HEADS, _HEADS, _HEADS, use_causal_mask=True),
    "attention.cached_attention": _call(f(1, 1, 2, 16), f(1, 32, 2, 16), f(1, 32, 2, 16), 3),
    "attention.fused_multihead_attention": _call(f(1, 128, 32), 2, params=_params()),
    "attention.multihead_attention_params": _call(jax.random.key(0), **_LAYER),
    "attention.paged_attention": _call(f(2, 1, 2, 16), _PAGES, _PAGES, _INTEGERS, _LENGTHS),
    "attention.write_pages": _call(_PAGES, _PAGES, _INTEGERS, _LENGTHS, f(2, 1, 2, 16), f(2, 1, 2, 16)),
    "collective.async_all_reduce": _call({"w": f(16, 8)}, use_compression=True),
    "collective.optimized_all_gather": _call(f(8, 4), use_ring_algorithm=True),
    "collective.reduce_scatter": _call(f(8, 4)),
    "collective.all_to_all": _call(f(8, 8)),
    "collective.all_gather_matmul": _call(f(8, 4), f(4, 4)),
    "collective.matmul_reduce_scatter": _call(f(8, 4), f(4, 4)),
    "collective.zero_residual": _call({"w": f(16, 8)}),
    "conv.causal_conv1d": _call(f(1, 32, 8), f(4, 8)),
    "conv.winograd_conv2d": _call(f(1, 16, 16, 8), f(3, 3, 8, 8)),
    "conv.conv1d": _call(f(1, 16, 4), f(3, 4, 4)),
    "conv.conv2d": _call(f(1, 8, 8, 4), f(3, 3, 4, 4)),
    "conv.conv3d": _call(f(1, 4, 4, 4, 2), f(3, 3, 3, 2, 2)),
    "conv.conv_transpose1d": _call(f(1, 16, 4), f(3, 4, 4)),
    "conv.conv_transpose2d": _call(f(1, 8, 8, 4), f(3, 3, 4, 4)),
    "conv.conv_transpose3d": _call(f(1, 4, 4, 4, 2), f(3, 3, 3, 2, 2)),
    "fft.radix_optimized_fft": _call(f(2, 64)),
    "linalg.optimized_gemm": _call(f(16, 16), f(16, 16)),
    "linalg.grouped_matmul": _call(f(16, 8), f(4, 8, 6), f(4, dtype=jnp.int32)),
    "linalg.fast_svd": _call(f(96, 80), 4),
    "linalg.qr": _call(f(64, 8)),
    "linalg.quantised_matmul": _call(f(4, 64), f(32, 64, dtype=jnp.int8), f(32, 2), group=32),
    "linalg.cholesky_update": _call(f(8, 8), f(8)),
    "loss.cross_entropy": _call(f(8, 16), f(16, 32), f(8, dtype=jnp.int32)),
    "rotary.rotary": _call(f(1, 8, 2, 16), f(1, 8, 1, 16), positions=f(8, dtype=jnp.int32)),
    "scan.selective_scan": _call(f(1, 32, 2, 4), f(1, 32, 2), f(2), f(1, 32, 1, 4), f(1, 32, 1, 4)),
    "scan.parallel_scan": _call(lambda h, x: (0.9 * h + x, h), f(8), f(16, 8)),
    "scan.linear_recurrence": _call(f(16, 8), f(16, 8)),
    "scan.matrix_linear_recurrence": _call(f(4, 4), f(16, 4)),
    "scan.semiring_scan": _call(f(16, 8)),
    "scan.lif": _call(f(16, 8)),
    "tropical.matmul": _call(f(32, 32), f(32, 32)),
    "tropical.matvec": _call(f(16, 16), f(16)),
    "tropical.closure": _call(f(16, 16)),
    "tropical.shortest_paths": _call(f(16, 16), implementation="xla"),
    "tropical.conv1d": _call(f(1, 2, 16), f(4, 2, 3)),
    "tropical.conv2d": _call(f(1, 2, 8, 8), f(4, 2, 3, 3)),
    "tropical.polyval": _call(f(16), f(16)),
    "tropical.pool": _call(f(1, 2, 16), 2),
    "tropical.scan": _call(f(16), f(16)),
    "vq.nearest_code": _call(f(64, 16), f(32, 16)),
    "vq.vector_quantise": _call(_codebooks(), f(8, 16), train=True),
    "vq.product_quantise": _call(_codebooks(2), f(8, 16), train=True),
    "vq.residual_quantise": _call(_codebooks(2), f(8, 8), train=True),
    "vq.update_codebook": _call(_codebooks(), f(8, 16), f(8, dtype=jnp.int32)),
    "vq.initial_codebook_state": _call(jax.random.key(0), 32, 16),
    "vq.dequantise": _call(f(32, 16), f(8, dtype=jnp.int32)),
}

# Over a mesh axis, which has to be there when they are lowered.
NEED_AXIS = {name for name in CALLS if name.startswith("collective.") and "zero" not in name}


def functions() -> dict[str, Callable[..., Any]]:
    """Every public function of the categories of ``capibara.ops``, as ``category.name``."""
    found = {}
    for package in pkgutil.iter_modules(ops.__path__):
        # What layers consist of are no operations that users call: they have one implementation, and own tests.
        if not package.ispkg or package.name == "layers":
            continue
        module = importlib.import_module(f"{ops.__name__}.{package.name}")
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type):
                found[f"{package.name}.{name}"] = function
    return found


def called(name: str, function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The call of :data:`CALLS` as a function of arrays alone, and their shapes; collectives on one device."""
    leaves, tree = jax.tree.flatten(CALLS[name])
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]

    def run(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        return jax.tree.leaves(function(*args, **kwargs))

    if name in NEED_AXIS:
        run = inside_one_device(run)
    return run, [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places]


def inside_one_device(run: Callable[..., Any], devices: Any = None) -> Callable[..., Any]:
    """``run`` inside ``jax.shard_map`` on a mesh of one device."""
    mesh = Mesh(np.array(jax.devices()[:1] if devices is None else devices[:1]), ("data",))
    every = PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)


def named(text: str) -> dict[str, set[str]]:
    """The implementations whose operations are in a program, by operation: from the names that the registry gives."""
    found: dict[str, set[str]] = {}
    for op, implementation in re.findall(r"capibara:(\w+):(\w+)", text):
        found.setdefault(op, set()).add(implementation)
    return found


def custom_calls(text: str) -> set[str]:
    """The kernels in a program, StableHLO or compiled: what calls the code of a native or a Pallas kernel.

    XLA writes a kernel of its own for products of groups on TPUs, which is not one of them.
    """
    text = re.sub(r"%ragged-dot[^\n]*", "", text)
    targets = re.findall(r"custom_call @([\w.]+)|custom_call_target\s*=\s*\"([\w.]+)\"", text)
    return {
        a or b
        for a, b in targets
        if (a or b).startswith(("capibara", "tpu_custom_call", "__gpu$xla.gpu.triton"))
    }
