"""JAX functions with quantized weights: the same function, with other products.

The function is traced with plain arrays in place of the codes, and the resulting jaxpr is evaluated equation by
equation. A ``dot_general`` that sums over axes of a quantized weight becomes
:func:`capibara.ops.linalg.quantised_matmul`; a gather of table rows becomes a look-up in the codes; a ``scan`` over
stacked layers iterates over stacked codes. Reshapes, transposes and conversions are deferred until then. Any other
operation (a convolution, a function with a custom derivative, a ``while`` loop) receives the decoded weight, which
exists only inside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.compress.coded import is_coded
from capibara.compress.container import Archive
from capibara.compress.direct import QuantisedMatrix, QuantisedStack, describe_codes, load_codes
from capibara.compress.errors import CompressError
from capibara.compress.models.adapters import Adapter
from capibara.compress.models.numbers import from_bits, is_array, is_torch
from capibara.jax_versions import scan_counts

__all__ = ["Coded", "CodedArrays", "describe_weights", "load_weights", "quantized"]

Coded = QuantisedMatrix | QuantisedStack


def quantized(
    function: Callable[..., Any], *, decoded: Callable[[str, str], object] | None = None
) -> Callable[..., Any]:
    """``function(params, *args)`` that takes quantized weights among its parameters.

    Equivalent, except for memory: decoding them first. It supports ``jax.jit``, ``jax.grad`` (with respect to other
    arguments and parameters) and ``jax.vmap`` as the function does.

    Args:
      function: a function of nested parameters and arrays that JAX can trace.
      decoded: called, whenever the function is traced, with the path of each weight that the program has to decode
        and the name of the operation that needs it.

    Returns:
      The function. Its first argument is as before, but some arrays may be
      :class:`~capibara.compress.direct.QuantisedMatrix` or :class:`~capibara.compress.direct.QuantisedStack`.
    """

    def run(params: Any, *args: Any) -> Any:
        flat, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_coded)
        plain = [jax.ShapeDtypeStruct(v.shape, v.dtype) if is_coded(v) else v for _, v in flat]
        closed, shape = jax.make_jaxpr(function, return_shape=True)(
            jax.tree_util.tree_unflatten(tree, plain), *args
        )
        given: list[Any] = []
        for path, value in flat:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            given.append(_Weight.of(name, value) if is_coded(value) else value)
        given += jax.tree_util.tree_leaves(args)
        out = _Evaluation(decoded).run(closed.jaxpr, closed.consts, given)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), out)

    return run


@dataclass(frozen=True)
class _Weight:
    """A weight on its way through the program: axis ``i`` of what is seen is axis ``order[i]`` of the codes."""

    name: str
    codes: Coded
    order: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, name: str, codes: Coded) -> _Weight:
        return cls(name, codes, tuple(range(len(codes.shape))), jnp.dtype(codes.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape[i] for i in self.order)

    @property
    def straight(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def numbers(self) -> jax.Array:
        return self.codes.dequantise().transpose(self.order).astype(self.dtype)


class _Evaluation:
    def __init__(self, decoded: Callable[[str, str], object] | None) -> None:
        self.decoded = decoded

    def plain(self, value: Any, wanted_by: str) -> Any:
        """The value as an array."""
        if not isinstance(value, _Weight):
            return value
        if self.decoded is not None:
            self.decoded(value.name, wanted_by)
        return value.numbers()

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The outputs, as arrays."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> Any:
            return v.val if hasattr(v, "val") else env[v]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.apply(eqn, values), strict=True))
        return [self.plain(read(v), "an output") for v in jaxpr.outvars]

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if any(isinstance(v, _Weight) for v in values):
            if (rule := _RULES.get(name)) is not None and (out := rule(self, eqn, values)) is not None:
                return out
            values = [self.plain(v, name) for v in values]
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    def inline(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        """A call: what is inside is gone through as well."""
        inner = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params), None)
        if inner is None:
            return None
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)

    def cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        index, *operands = values
        branches = [
            lambda _, branch=branch: self.run(branch.jaxpr, branch.consts, operands)
            for branch in eqn.params["branches"]
        ]
        return lax.switch(self.plain(index, "cond").astype(jnp.int32), branches, None)

    def scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        p = eqn.params
        body, (consts, carried) = p["jaxpr"], scan_counts(eqn)
        fixed, carry, moving = values[:consts], values[consts : consts + carried], values[consts + carried :]
        carry = [self.plain(v, "scan") for v in carry]
        stacked: dict[int, tuple[str, Any]] = {}
        for i, value in enumerate(moving):
            if isinstance(value, _Weight):
                if value.straight and isinstance(value.codes, QuantisedStack):
                    moving[i], stacked[i] = value.codes.layers(), (value.name, value.dtype)
                else:
                    moving[i] = self.plain(value, "scan")

        def step(state: Any, slices: Any) -> Any:
            here = list(slices)
            for i, (name, dtype) in stacked.items():
                here[i] = replace(_Weight.of(name, here[i]), dtype=dtype)
            out = self.run(body.jaxpr, body.consts, [*fixed, *state, *here])
            return out[:carried], out[carried:]

        after, rows = lax.scan(
            step, carry, tuple(moving), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )
        return [*after, *rows]

    def product(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        (sums, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
        if batch[0] or not jnp.issubdtype(out.dtype, jnp.floating):
            return None
        left = isinstance(values[0], _Weight)
        weight, other = values if left else values[::-1]
        over, other_over = sums if left else sums[::-1]
        if isinstance(other, _Weight):
            other = self.plain(other, "dot_general")
        other = jnp.asarray(other)
        if not isinstance(weight.codes, QuantisedMatrix) or not jnp.issubdtype(other.dtype, jnp.floating):
            return None
        pairs = sorted((weight.order[d], e) for d, e in zip(over, other_over, strict=True))
        axes = tuple(axis for axis, _ in pairs)
        free = [d for d in range(other.ndim) if d not in other_over]
        x = other.transpose(*free, *(e for _, e in pairs))
        x = x.reshape(*x.shape[: len(free)], -1)
        # What is summed in more bits than the inputs have is not rounded to theirs.
        wide = jnp.promote_types(x.dtype, out.dtype)
        found = weight.codes.product(x.astype(wide), axes)
        if found is None:
            return None
        # The weight's other axes come in the order of the codes; here they are wanted as the program sees them.
        rest = [d for d in range(len(weight.order)) if d not in over]
        stored = sorted(rest, key=lambda d: weight.order[d])
        lead = len(free)
        mine = [lead + stored.index(d) for d in rest]
        order = [*mine, *range(lead)] if left else [*range(lead), *mine]
        return [found.transpose(order).astype(out.dtype)]

    def gather(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        weight, indices = values
        p, rank = eqn.params, len(eqn.outvars[0].aval.shape)
        numbers = p["dimension_numbers"]
        if (
            not isinstance(weight, _Weight)
            or isinstance(indices, _Weight)
            or not weight.straight
            or not isinstance(weight.codes, QuantisedMatrix)
            or not weight.codes.has_rows
            or tuple(numbers.collapsed_slice_dims) != (0,)
            or tuple(numbers.start_index_map) != (0,)
            or tuple(numbers.operand_batching_dims)
            or tuple(numbers.offset_dims) != (rank - 1,)
            or tuple(p["slice_sizes"]) != (1, weight.shape[1])
        ):
            return None
        places = indices[..., 0]
        count = weight.shape[0]
        inside = (places >= 0) & (places < count)
        found = weight.codes.rows(jnp.clip(places, 0, count - 1)).astype(weight.dtype)
        if p["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            fill = jnp.nan if p["fill_value"] is None else p["fill_value"]
            found = jnp.where(inside[..., None], found, jnp.asarray(fill, weight.dtype))
        return [found]

    def part(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        """Some of stacked layers."""
        weight, *starts = values
        p, name = eqn.params, eqn.primitive.name
        if (
            not isinstance(weight, _Weight)
            or not weight.straight
            or not isinstance(weight.codes, QuantisedStack)
        ):
            return None
        if any(tuple(v.aval.shape)[1:] != weight.shape[1:] for v in eqn.outvars):
            return None
        sizes = [v.aval.shape[0] for v in eqn.outvars]
        if name == "split":
            firsts: list[Any] = [sum(sizes[:i]) for i in range(len(sizes))]
        elif name == "slice":
            if p["strides"] is not None and p["strides"][0] != 1:
                return None
            firsts = [p["start_indices"][0]]
        else:
            firsts = starts[:1]
        parts = [weight.codes.some(first, size) for first, size in zip(firsts, sizes, strict=True)]
        return [replace(weight, codes=part) for part in parts]

    def convert(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        dtype = jnp.dtype(eqn.params["new_dtype"])
        return [replace(values[0], dtype=dtype)] if jnp.issubdtype(dtype, jnp.floating) else None

    def same(self, eqn: Any, values: list[Any]) -> list[Any]:
        return values[:1]

    def transpose(self, eqn: Any, values: list[Any]) -> list[Any]:
        weight = values[0]
        return [replace(weight, order=tuple(weight.order[i] for i in eqn.params["permutation"]))]

    def reshape(self, eqn: Any, values: list[Any]) -> list[Any] | None:
        weight, shape = values[0], tuple(eqn.outvars[0].aval.shape)
        if not weight.straight:
            return None
        codes = weight.codes.reshape(shape)
        return None if codes is None else [replace(_Weight.of(weight.name, codes), dtype=weight.dtype)]


_RULES: dict[str, Callable[[_Evaluation, Any, list[Any]], list[Any] | None]] = {
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"), _Evaluation.inline
    ),
    "cond": _Evaluation.cond,
    "scan": _Evaluation.scan,
    "dot_general": _Evaluation.product,
    "gather": _Evaluation.gather,
    "convert_element_type": _Evaluation.convert,
    "copy": _Evaluation.same,
    "sharding_constraint": _Evaluation.same,
    "transpose": _Evaluation.transpose,
    **dict.fromkeys(("split", "slice", "dynamic_slice"), _Evaluation.part),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _Evaluation.reshape),
}


def load_weights(archive: Archive, likes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Load tensors of an archive: quantized if it has codes, otherwise decoded.

    Args:
      archive: an open one.
      likes: for each name an array to match, or a ``ShapeDtypeStruct``; tensors that match NumPy or PyTorch arrays
        are decoded.

    Returns:
      The tensors by name (two names of one stored tensor share their codes, or their JAX array if they are sharded
      alike); and, for the decoded ones, the reason.
    """
    out: dict[str, Any] = {}
    why: dict[str, str] = {}
    known: dict[str, Coded | str] = {}
    numbers: dict[Any, Any] = {}
    for name, like in likes.items():
        entry = archive[name]
        same = entry.same_as or name
        if same not in known:
            known[same] = load_codes(archive, same)
        own = not isinstance(
            like, jax.Array | jax.ShapeDtypeStruct
        )  # it can be written to, and is not shared
        found: Any = known[same]
        if own:
            found = "a tensor of PyTorch's" if is_torch(like) else "an array of NumPy's"
        if isinstance(found, str):
            why[name] = found
            place = name if own else (same, like.sharding)
            if place not in numbers:
                bits = archive.read(name).reshape(-1)
                numbers[place] = from_bits(bits, entry.format, entry.shape, like)
            found = numbers[place]
        out[name] = found
    return out, why


def describe_weights(archive: Archive, likes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """What :func:`load_weights` will load: codes of ``jax.ShapeDtypeStruct``, of other tensors their ``likes``."""
    out: dict[str, Any] = {}
    for name, like in likes.items():
        found = describe_codes(archive, name)
        out[name] = like if isinstance(found, str) else found
    return out


class CodedArrays:
    """The arrays of a model, quantized where the archive has codes, and the model's function over them.

    Attributes:
      arrays: by name.
      quantized: names of the quantized ones.
      why: reasons for the others.
      on_the_way: names of quantized weights that a program decodes, and for which operation.
    """

    def __init__(self, archive: Archive, adapter: Adapter) -> None:
        tied = adapter.tied
        own = {name: like for name, like in adapter.arrays.items() if name not in tied}
        found, why = load_weights(archive, own)
        self.arrays = {name: found[tied.get(name, name)] for name in adapter.arrays}
        self.why = {name: why[tied.get(name, name)] for name in adapter.arrays if tied.get(name, name) in why}
        self.on_the_way: dict[str, str] = {}
        self.quantized = tuple(n for n in self.arrays if n not in self.why)
        self._adapter = adapter.skeleton()
        self._run = jax.jit(quantized(self._apply, decoded=self.on_the_way.__setitem__))

    @property
    def nbytes(self) -> int:
        return sum({id(a): int(a.nbytes) for a in self.arrays.values()}.values())

    @property
    def tree(self) -> Any:
        """The arrays nested like the model's."""
        return self._adapter.with_arrays(self.arrays)

    def decoded(self, archive: Archive) -> Any:
        """The decoded arrays, nested like the model's, read again from the archive."""
        out: dict[str, Any] = {}
        for name, kept in self.arrays.items():
            like = jnp.zeros(()) if is_coded(kept) else kept
            entry = archive[name]
            same = next((n for n in out if self.arrays[n] is kept), None)
            if same is not None:
                out[name] = out[same]
                continue
            out[name] = from_bits(archive.read(name).reshape(-1), entry.format, entry.shape, like)
        return self._adapter.with_arrays(out)

    def _apply(self, arrays: dict[str, Any], inputs: Any) -> Any:
        return self._adapter.run(self._adapter.with_arrays(arrays), inputs)

    def run(self, inputs: Any) -> Any:
        """The outputs.

        Raises:
          CompressError: JAX cannot trace the model.
        """
        return self._traced(self._run, inputs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the model; of the arguments arrays are traced, and anything else is as it is.

        Raises:
          CompressError: JAX cannot trace it.
        """
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def method(arrays: dict[str, Any], given: list[Any]) -> Any:
            known = dict(zip(places, given, strict=True))
            args, kwargs = tree.unflatten(known.get(i, leaf) for i, leaf in enumerate(leaves))
            owner = self._adapter.owner(self._adapter.with_arrays(arrays))
            return getattr(owner, name)(*args, **kwargs)

        run = quantized(method, decoded=self.on_the_way.__setitem__)
        return self._traced(run, [leaves[i] for i in places])

    def _traced(self, function: Callable[..., Any], given: Any) -> Any:
        try:
            return function(self.arrays, given)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise CompressError(
                f"model: JAX cannot trace it ({type(error).__name__}), which running quantized requires. "
                "Remedy: use jax.numpy instead of numpy, or decode=True."
            ) from error
