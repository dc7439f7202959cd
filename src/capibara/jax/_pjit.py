"""The old ``pjit`` spelling (``in_axis_resources``), as an adapter to :func:`jax.jit`.

JAX had ``pjit(fun, in_axis_resources, out_axis_resources)`` until 0.4; partition specs were resolved against
the mesh of the enclosing ``with mesh:``. Today that is ``jax.jit(fun, in_shardings=…, out_shardings=…)`` with
:class:`jax.sharding.NamedSharding`. The adapter does that translation, so old code runs while it is migrated.
Document 3 calls it without a function; then it is a decorator factory::

    policy = jax.pjit(in_axis_resources=P("data", "model"), out_axis_resources=P("data", "model"))
    with mesh:
        y = policy(step)(x)
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from capibara.errors import CapibaraError

__all__ = ["PjitError", "pjit"]

_UNSET: Any = object()


class PjitError(CapibaraError, ValueError):
    """The deprecated ``pjit`` adapter cannot translate the call."""


def _current_mesh() -> Mesh | None:
    """The concrete mesh of the enclosing ``jax.set_mesh(mesh)`` or ``with mesh:``, or None."""
    from capibara.config.mesh import current_mesh

    return current_mesh()


def _to_shardings(resources: Any, mesh: Mesh, argument: str) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Sharding):
            return leaf
        if leaf is None:
            return NamedSharding(mesh, PartitionSpec())  # the old None: replicated
        if isinstance(leaf, PartitionSpec):
            try:
                return NamedSharding(mesh, leaf)
            except ValueError as error:
                raise PjitError(
                    f"{argument}={leaf} does not fit the current mesh {dict(mesh.shape)}: {error}"
                ) from error
        raise PjitError(
            f"{argument} has the leaf {leaf!r} ({type(leaf).__name__}); "
            "expected a PartitionSpec, a Sharding or None (replicated)"
        )

    return jax.tree.map(
        convert, resources, is_leaf=lambda leaf: leaf is None or isinstance(leaf, PartitionSpec | Sharding)
    )


def pjit(
    fun: Callable[..., Any] | None = None,
    in_axis_resources: Any = _UNSET,
    out_axis_resources: Any = _UNSET,
    static_argnums: int | tuple[int, ...] | None = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    *,
    mesh: Mesh | None = None,
    **jit_options: Any,
) -> Callable[..., Any]:
    """Deprecated: compile ``fun`` with the shardings of the old ``pjit``.

    Equivalent JAX: ``jax.jit(fun, in_shardings=NamedSharding(mesh, spec), out_shardings=…)``.

    Args:
      fun: the function; without it a decorator is returned.
      in_axis_resources: a tree of ``PartitionSpec`` that is a prefix of the arguments; None is replicated. A
        single spec goes to every argument. Left out, the arguments keep the sharding they come with.
      out_axis_resources: the same for the results.
      static_argnums, donate_argnums, **jit_options: handed to :func:`jax.jit`.
      mesh: the mesh; without it that of the enclosing ``with mesh:`` or ``jax.set_mesh(mesh)`` at the call.

    Raises:
      PjitError: no mesh at the call, an axis name the mesh does not have, or a leaf that is not a spec.
    """
    warnings.warn(
        "pjit(in_axis_resources=…, out_axis_resources=…) is deprecated; use "
        "jax.jit(fun, in_shardings=NamedSharding(mesh, spec), out_shardings=…)",
        DeprecationWarning,
        stacklevel=2,
    )
    if fun is None:
        return lambda function: _adapt(
            function, in_axis_resources, out_axis_resources, static_argnums, donate_argnums, mesh, jit_options
        )
    return _adapt(
        fun, in_axis_resources, out_axis_resources, static_argnums, donate_argnums, mesh, jit_options
    )


def _adapt(
    fun: Callable[..., Any],
    in_resources: Any,
    out_resources: Any,
    static_argnums: int | tuple[int, ...] | None,
    donate_argnums: int | tuple[int, ...] | None,
    mesh: Mesh | None,
    jit_options: dict[str, Any],
) -> Callable[..., Any]:
    if not callable(fun):
        raise PjitError(f"fun is {fun!r} ({type(fun).__name__}); expected a function")
    static = {static_argnums} if isinstance(static_argnums, int) else set(static_argnums or ())
    compiled: dict[Mesh, tuple[Callable[..., Any], Any]] = {}
    lock = threading.Lock()

    def for_mesh() -> tuple[Callable[..., Any], Any]:
        where = mesh if mesh is not None else _current_mesh()
        if where is None:
            raise PjitError(
                "pjit was called outside a mesh, and partition specs mean nothing without one; "
                "call it inside `with jax.set_mesh(mesh):`, or give mesh=…"
            )
        with lock:
            if where not in compiled:
                options = dict(jit_options)
                in_shardings = _UNSET
                if in_resources is not _UNSET:
                    in_shardings = _to_shardings(in_resources, where, "in_axis_resources")
                    in_shardings = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
                    options["in_shardings"] = in_shardings
                if out_resources is not _UNSET:
                    options["out_shardings"] = _to_shardings(out_resources, where, "out_axis_resources")
                function = jax.jit(
                    fun, static_argnums=static_argnums, donate_argnums=donate_argnums, **options
                )
                compiled[where] = function, in_shardings
            return compiled[where]

    def place(args: tuple[Any, ...], in_shardings: Any) -> tuple[Any, ...]:
        # jit refuses an array that already lives elsewhere on the mesh; the spec says where it is wanted.
        if in_shardings is _UNSET:
            return args
        dynamic = [index for index in range(len(args)) if index not in static]
        placed = jax.device_put(tuple(args[index] for index in dynamic), in_shardings)
        by_index = dict(zip(dynamic, placed, strict=True))
        return tuple(by_index.get(index, arg) for index, arg in enumerate(args))

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        function, in_shardings = for_mesh()
        return function(*place(args, in_shardings), **kwargs)

    # Old code lowers before it compiles: `pjit(f).lower(x).compile()`.
    wrapped.lower = lambda *args, **kwargs: for_mesh()[0].lower(*args, **kwargs)  # type: ignore[attr-defined]
    return wrapped
