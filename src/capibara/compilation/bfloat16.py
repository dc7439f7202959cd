"""Products in bfloat16: the same function, with bfloat16 operands wherever it multiplies float32 arrays.

A matrix unit multiplies bfloat16 numbers and sums in float32. To cast a function's inputs instead would round
everything in between too: parameters that a training step updates, optimizer state, losses. So the traced program is
rewritten: each product and convolution of float32 arrays whose author chose no precision gets its operands cast and
keeps its float32 result. The bodies of loops, conditions, nested ``jit`` and ``jax.checkpoint`` are rewritten too.

The result cannot be differentiated through custom derivative rules, which are gone by then: it is made when a program
is compiled, after all differentiation.

Not rewritten, and counted: products inside ``jax.shard_map`` and Pallas kernels, which have dtypes of their own, and
``jax.lax.ragged_dot``.
Foreign calls (``jax.ffi``) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Rewritten", "with_bfloat16_products"]

_PRODUCTS = ("dot_general", "conv_general_dilated")
_KEPT = ("ragged_dot_general",)
# Calls whose function may be inlined: what they add concerns differentiation, which is over.
_INLINED = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "closed_call",
    "core_call",
    "custom_lin",
)
_REBUILT = ("jit", "pjit", "scan", "while", "cond", "checkpoint", "remat", "remat2")


@dataclass
class Rewritten:
    """What was done to a program.

    Attributes:
      products: how many got bfloat16 operands.
      kept: why others of float32 operands did not, with how many there are of each.
    """

    products: int = 0
    kept: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "".join(f"; {count} kept in float32: {why}" for why, count in self.kept.items())
        return f"{self.products} products with bfloat16 operands{others}"

    def keep(self, why: str, count: int = 1) -> None:
        """Count products that stay in float32."""
        if count:
            self.kept[why] = self.kept.get(why, 0) + count


def with_bfloat16_products(function: Callable[..., Any], done: Rewritten) -> Callable[..., Any]:
    """``function`` with bfloat16 operands in its products of float32 arrays; ``done`` is filled when it is traced."""
    import jax

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(lambda a, k: function(*a, **k), return_shape=True)(args, kwargs)
        done.products, done.kept = 0, {}
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)), done)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return rewritten


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], done: Rewritten) -> list[Any]:
    """Run a jaxpr equation by equation, products in bfloat16."""
    from jax.extend.core import Literal

    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        results = _equation(eqn, inputs, done)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Any], done: Rewritten) -> Sequence[Any]:
    import jax.numpy as jnp

    name, params = eqn.primitive.name, eqn.params
    if name in _PRODUCTS and all(atom.aval.dtype == jnp.float32 for atom in eqn.invars):
        if _chosen(params):
            done.keep("they have a precision of their own")
        else:
            done.products += 1
            inputs = [x.astype(jnp.bfloat16) for x in map(jnp.asarray, inputs)]
            params = {**params, "preferred_element_type": jnp.dtype(jnp.float32), "precision": None}
    elif _is_kept(eqn):
        done.keep(f"they are {name}")
    elif (
        name in _INLINED and (inner := _inner(params)) is not None and len(inner.jaxpr.invars) == len(inputs)
    ):
        return _evaluate(inner.jaxpr, inner.consts, inputs, done)
    elif name in _REBUILT:
        params = {key: _rewritten_parameter(value, done) for key, value in params.items()}
    else:
        count = sum(_products_in(inner) for inner in _jaxprs(params))
        done.keep(f"they are inside {name}", count)
    with eqn.ctx.manager:  # the mesh, and settings such as 64-bit dtypes, that it was traced with
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def _chosen(params: dict[str, Any]) -> bool:
    """Whether a product's author chose a precision, or a dtype of the sums."""
    import jax
    import jax.numpy as jnp

    precision = params["precision"]
    each = precision if isinstance(precision, tuple) else (precision,)
    kind = params.get("preferred_element_type")
    return any(one not in (None, jax.lax.Precision.DEFAULT) for one in each) or kind not in (
        None,
        jnp.float32,
    )


def _inner(params: dict[str, Any]) -> Any:
    for key in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
        if hasattr(params.get(key), "consts"):
            return params[key]
    return None


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    from jax.extend.core import jaxprs_in_params

    return list(jaxprs_in_params(params))


def _is_kept(eqn: Any) -> bool:
    import jax.numpy as jnp

    # Two operands, and the sizes of the groups.
    return eqn.primitive.name in _KEPT and all(atom.aval.dtype == jnp.float32 for atom in eqn.invars[:2])


def _products_in(jaxpr: Any) -> int:
    import jax.numpy as jnp

    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(
        _is_kept(eqn)
        or (eqn.primitive.name in _PRODUCTS and all(atom.aval.dtype == jnp.float32 for atom in eqn.invars))
        for eqn in jaxpr.eqns
    ) + sum(_products_in(inner) for eqn in jaxpr.eqns for inner in _jaxprs(eqn.params))


def _rewritten_parameter(value: Any, done: Rewritten) -> Any:
    """A parameter of an equation: jaxprs in it are rewritten, all else stays."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    if isinstance(value, ClosedJaxpr):
        return _retraced(value.jaxpr, value.consts, done)
    if isinstance(value, Jaxpr):
        return _retraced(value, (), done).jaxpr
    if isinstance(value, tuple) and value and all(isinstance(one, ClosedJaxpr) for one in value):
        return tuple(_retraced(one.jaxpr, one.consts, done) for one in value)
    return value


def _retraced(jaxpr: Any, consts: Sequence[Any], done: Rewritten) -> Any:
    import jax

    def body(*arguments: Any) -> list[Any]:
        return _evaluate(jaxpr, consts, arguments, done)

    kinds = [
        jax.ShapeDtypeStruct(
            a.shape, a.dtype, weak_type=getattr(a, "weak_type", False), sharding=_sharding(a)
        )
        for a in (variable.aval for variable in jaxpr.invars)
    ]
    return jax.make_jaxpr(body)(*kinds)


def _sharding(aval: Any) -> Any:
    """Of a type on a mesh with explicit axes; elsewhere types have none."""
    sharding = getattr(aval, "sharding", None)
    explicit = sharding is not None and any(
        "Explicit" in str(kind) for kind in getattr(sharding.mesh, "axis_types", ())
    )
    return sharding if explicit else None
