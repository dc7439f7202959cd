"""Planning any JAX step function: ``plan(step_work(step, (state, batch)), "v5e:4x4")``."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.files import replace_file
from capibara.plan.compiler import Job, ProgramCache
from capibara.plan.errors import PlanError
from capibara.plan.isolated import isolated
from capibara.plan.search.space import WHOLE_PRODUCTS, meshes
from capibara.plan.sizes import size_text
from capibara.plan.slices import Slice
from capibara.plan.step_arguments import (
    Rules,
    arrays_of,
    axis_names,
    mesh_choices,
    only_arrays,
    preferred_axes,
    rules_of,
)
from capibara.plan.validation import MeshSizes
from capibara.plan.work import Rough
from capibara.sharding import Layout, Links

__all__ = ["StepWork", "step_work"]

# A closed-over array up to this size is a constant like any other.
_SMALL_CONSTANT = 64 << 10
_REACHED = 0.5


@dataclass(frozen=True, eq=False)
class StepWork:
    """An exported step function, created by :func:`step_work`.

    Attributes:
      title: its name and arguments.
      path, sha256: the exported function.
      shapes, item_sizes: of the flat arguments.
      axes: logical axis names of the flat arguments, None if not given.
      kinds: indices of the flat arguments by kind: ``state``, ``batch``.
      donated: indices of the donated ones.
      counted_flops: matrix products and convolutions of a step, counted from its jaxpr.
      tokens: of a step, if given.
      structure: the trees of the arguments (a JAX tree definition).
      rules: for the axis names, in place of the layout's; None: ``AxisRules``, on the axes ``data`` and ``model``.
      mesh_axes: the axes of a mesh, with ``rules``.
    """

    title: str
    path: Path
    sha256: str
    shapes: tuple[tuple[int, ...], ...]
    item_sizes: tuple[int, ...]
    axes: tuple[tuple[str | None, ...] | None, ...]
    kinds: dict[str, tuple[int, ...]]
    donated: tuple[int, ...]
    counted_flops: float
    tokens: int | None = None
    structure: Any = field(default=None, repr=False)
    rules: Rules | None = field(default=None, repr=False)
    mesh_axes: tuple[str, ...] = ()
    _specs: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return self.counted_flops

    def layouts(self, target: Slice) -> Iterator[Layout]:
        """Meshes and shardings; rematerialisation is up to the function."""
        if self.rules is not None:
            yield from self._ruled_layouts(target)
            return
        widest = max((size for n in self.kinds["state"] for size in self.shapes[n]), default=1)
        rows = [self.shapes[n][0] for n in self.kinds["batch"] if self.shapes[n]]
        for mesh in meshes(target.num_devices, widest):
            data = dict(mesh)["data"]
            if any(size % data for size in rows):
                continue
            for parameters in ("sharded", "replicated") if data > 1 else ("sharded",):
                yield Layout(mesh=mesh, parameters=parameters, remat="none", flags=WHOLE_PRODUCTS)

    def _ruled_layouts(self, target: Slice) -> Iterator[Layout]:
        """Every mesh of the rules' axes whose devices all have a part: of the rows, if an axis is for these."""
        of_rows = {axis for n in self.kinds["batch"] for axis in self._wanted(n)}
        for mesh in mesh_choices(target.num_devices, self.mesh_axes):
            layout = Layout(mesh=mesh, remat="none", flags=WHOLE_PRODUCTS)
            used = {axis for n in range(len(self.shapes)) for axis in _mesh_axes(self._spec(n, layout))}
            rows = {axis for n in self.kinds["batch"] for axis in _mesh_axes(self._spec(n, layout))}
            if all(axis in (rows if axis in of_rows else used) for axis, size in mesh if size > 1):
                yield layout

    def _wanted(self, number: int) -> set[str]:
        """Mesh axes that the rules prefer for an array's dimensions, whether these divide or not."""
        if self.rules is None:
            return set()
        found: set[str] = set()
        for name in self.axes[number] or ():
            found |= set() if name is None else preferred_axes(self.rules, name)
        return found & set(self.mesh_axes)

    def specs(self, layout: Layout) -> tuple[Any, ...]:
        """A ``PartitionSpec`` for every array of the arguments, in trees like them: a candidate's sharding."""
        import jax
        from jax.sharding import PartitionSpec

        flat = [
            PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in self._spec(n, layout)))
            for n in range(len(self.shapes))
        ]
        return jax.tree.unflatten(self.structure, flat)

    def rough(self, layout: Layout, target: Slice) -> Rough:
        """The exact arguments; temporaries are not known before the program is compiled."""
        held = {kind: self._bytes(layout, numbers) for kind, numbers in self.kinds.items()}
        sizes = layout.axis_sizes
        data_axes, model_axes = ([axis] if axis in sizes else [] for axis in ("data", "model"))
        if self.rules is not None:
            of_rows = {axis for n in self.kinds["batch"] for axis in _mesh_axes(self._spec(n, layout))}
            data_axes, model_axes = list(of_rows), [axis for axis in sizes if axis not in of_rows]
        data, model = (math.prod(sizes[axis] for axis in axes) for axes in (data_axes, model_axes))
        whole = sum(math.prod(self.shapes[n]) * self.item_sizes[n] for n in self.kinds["state"])
        rows = sum(math.prod(self.shapes[n]) * self.item_sizes[n] for n in self.kinds["batch"]) / data
        links = Links(sizes, 2 * target.link_bandwidth, hop_seconds=0.0)
        sent = (3 if layout.parameters == "sharded" else 2) * links.gather(whole / model, data_axes)
        sent += 8 * links.gather(rows, model_axes)
        peak = target.chip.peak("bfloat16") * target.num_devices * _REACHED
        traffic = 2 * sum(held.values()) / (target.chip.hbm_bandwidth or 1e12)
        return Rough(held, self.counted_flops / peak, traffic, sent)

    def job(self, layout: Layout, target: Slice) -> Job:
        """The program to compile."""
        return Job(
            builder="capibara.plan.workloads.exported:lower_exported",
            params={
                "path": str(self.path),
                "sha256": self.sha256,
                "specs": [self._spec(n, layout) for n in range(len(self.shapes))],
                "kinds": {kind: list(numbers) for kind, numbers in self.kinds.items()},
                "donated": list(self.donated),
            },
            slice=target,
            mesh=layout.mesh,
            compiler_options=layout.compiler_options,
        )

    def _spec(self, number: int, layout: Layout) -> list[Any]:
        key = number, layout.mesh, layout.parameters
        if key not in self._specs:
            self._specs[key] = self._new_spec(number, layout)
        return self._specs[key]

    def _new_spec(self, number: int, layout: Layout) -> list[Any]:
        shape, names = self.shapes[number], self.axes[number]
        batch = number in self.kinds["batch"]
        if names is not None:
            rules = self.rules or layout.rules
            mesh: Any = MeshSizes(layout.mesh)
            spec = rules.spec(names, mesh, shape, kind="activations" if batch else "parameters")
            return [list(e) if isinstance(e, tuple) else e for e in spec]
        sizes = layout.axis_sizes
        out: list[Any] = [None] * len(shape)
        if self.rules is not None:  # without names: on every device
            return out
        if batch:
            if shape and shape[0] % sizes["data"] == 0:
                out[0] = "data"
            return out
        if math.prod(shape) < 2048:
            return out
        # Without names: the longest dimension that an axis divides; the model axis before the data axis.
        wanted = [("model", reversed(range(len(shape))))] if sizes["model"] > 1 else []
        if layout.parameters == "sharded" and sizes["data"] > 1:
            wanted.append(("data", iter(range(len(shape)))))
        for axis, places in wanted:
            free = [d for d in places if out[d] is None and shape[d] % sizes[axis] == 0]
            if free:
                out[max(free, key=lambda d: shape[d])] = axis
        return out

    def _bytes(self, layout: Layout, numbers: Sequence[int]) -> int:
        sizes = layout.axis_sizes
        total = 0
        for n in numbers:
            cut = 1
            for axis in _mesh_axes(self._spec(n, layout)):
                cut *= sizes[axis]
            total += math.prod(self.shapes[n]) * self.item_sizes[n] // cut
        return total


def step_work(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    axes: Sequence[Any] | None = None,
    batch_argnums: Sequence[int] | None = None,
    donate_argnums: Sequence[int] = (0,),
    tokens: int | None = None,
    name: str | None = None,
    rules: Any = None,
    mesh_axes: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> StepWork:
    """Export a step function, so that :func:`plan` can compile it for slices.

    No device is used: if this process has not started JAX's backends, a fork of it, restricted to the CPU, traces and
    exports the function, and only the result is returned. Side effects of tracing are then not visible in this
    process. If JAX already has its devices, and on systems other than Linux, this process exports the function; on
    the latter this starts JAX's backends.

    Args:
      step: a function of arrays and pytrees of them, jitted or not, such as ``(state, batch) -> (state, metrics)``.
      args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` (nothing is computed or allocated). Functions and other
        objects in their trees, such as an Equinox module's activation, are part of the program.
      axes: logical axis names of every array (``("embed", "mlp")``, or a ``PartitionSpec`` of them), in trees like
        ``args``; None for arrays without names. They are sharded by ``AxisRules``. By default, arrays are sharded along
        their longest dimensions.
      batch_argnums: arguments that are sharded along their first dimension over ``data``; by default all but the
        first.
      donate_argnums: arguments whose memory the results may reuse.
      tokens: of a step, for figures per token.
      name: replaces the function's name.
      rules: mesh axes for the names in ``axes``: an ``AxisRules``, or pairs such as ``("embed", "fsdp")`` or
        ``("batch", ("data", "fsdp"))``, as Flax's and MaxText's logical axis rules are. Every mesh of these axes is
        then considered; arrays without names are replicated.
      mesh_axes: those of the rules' mesh axes that a plan may use, outermost first; the others have one device.
      folder: folder for the exported function, instead of the user's cache.

    Raises:
      PlanError: an argument is invalid, or the folder is not writable; the function closes over arrays of more than
        64 KiB (they would be part of the program, on every device, and are not planned: make them arguments), or
        cannot be exported for TPUs.
    """
    import jax

    if not callable(step):
        raise PlanError(f"step is {type(step).__name__}, expected a function of the arrays in args")
    if not isinstance(args, Sequence) or isinstance(args, str) or not args:
        raise PlanError(
            f"args is {type(args).__name__}, expected the step's arguments in a tuple: (state, batch), or (x,) for one"
        )
    args = tuple(args)
    donated = _argnums("donate_argnums", donate_argnums, len(args))
    batches = (
        set(range(1, len(args)))
        if batch_argnums is None
        else _argnums("batch_argnums", batch_argnums, len(args))
    )
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise PlanError(f"tokens={tokens!r} must be an integer of at least 1")
    chosen, choices = rules_of(rules, mesh_axes)
    shown, whole = arrays_of(args)
    described = [jax.tree.map(_described, argument) for argument in shown]
    leaves: list[Any] = []
    owner: list[int] = []
    for number, argument in enumerate(described):
        found = jax.tree.leaves(argument)
        leaves += found
        owner += [number] * len(found)
    if not leaves:
        raise PlanError("args has no arrays: there is nothing to lay over a mesh")
    structure = jax.tree.structure(tuple(described))
    names = axis_names(axes, described)
    if chosen is not None:
        if not any(names[n] for n, of in enumerate(owner) if of in batches):
            raise PlanError("rules: the batch has no names. Give it some in axes, such as ('batch', None)")
        for each in names:
            if each is not None:
                chosen.check(each, choices, "axes")

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return only_arrays(step(*whole(arrays)))

    title = name or getattr(step, "__name__", type(step).__name__)
    found, data = isolated(lambda: _exported(flat, leaves, title), what=f"exporting {title}")
    digest = hashlib.sha256(data).hexdigest()
    place = (ProgramCache().folder if folder is None else Path(folder)) / f"{digest}.exported"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, data)
    except OSError as error:
        raise PlanError(
            f"the exported function cannot be written into {place.parent}: {error.strerror}. Name another folder "
            "(folder=)"
        ) from error
    kinds = {
        "state": tuple(n for n, of in enumerate(owner) if of not in batches),
        "batch": tuple(n for n, of in enumerate(owner) if of in batches),
    }
    return StepWork(
        title=f"{title}, {len(leaves)} arrays of {size_text(sum(_bytes(leaf) for leaf in leaves))}",
        path=place,
        sha256=digest,
        shapes=tuple(tuple(leaf.shape) for leaf in leaves),
        item_sizes=tuple(_bytes(leaf) // max(1, math.prod(leaf.shape)) for leaf in leaves),
        axes=names,
        kinds=kinds,
        donated=tuple(n for n, of in enumerate(owner) if of in donated),
        counted_flops=found["flops"],
        tokens=tokens,
        structure=structure,
        rules=chosen,
        mesh_axes=choices,
    )


def _exported(flat: Callable[..., Any], leaves: list[Any], title: str) -> tuple[dict[str, Any], bytes]:
    """What a step counts, and the file for the process that compiles it."""
    import jax
    import numpy as np

    from capibara.measure import count_flops

    try:
        jaxpr = jax.make_jaxpr(flat)(*leaves)
    except Exception as error:
        raise PlanError(
            f"{title} cannot be traced for these arguments: {type(error).__name__}: {error}"
        ) from error
    constants = [c for c in _constants(jaxpr) if getattr(c, "nbytes", 0) > _SMALL_CONSTANT]
    if constants:
        listed = ", ".join(f"{np.dtype(c.dtype).name}{list(c.shape)}" for c in constants[:4])
        total = sum(c.nbytes for c in constants)
        raise PlanError(
            f"{title} closes over {len(constants)} concrete arrays ({listed}; {total / 2**20:.1f} MiB): they would be "
            "copied into the program and replicated on every device. Make them arguments: def step(params, batch), "
            "not a function that reads params from outside"
        )
    try:
        exported = jax.export.export(
            jax.jit(flat),
            platforms=["tpu"],
            disabled_checks=[
                jax.export.DisabledSafetyCheck.custom_call(name)
                for name in ("tpu_custom_call", "LayoutConstraint")
            ],
        )(*leaves)
        data = bytes(exported.serialize())
    except Exception as error:
        raise PlanError(f"{title} cannot be exported for TPUs: {type(error).__name__}: {error}") from error
    return {"flops": float(count_flops(functools.partial(_call, flat), *leaves).total)}, data


def _argnums(name: str, numbers: Any, count: int) -> set[int]:
    out = set()
    for number in [numbers] if isinstance(numbers, int) else numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise PlanError(f"{name} has {number!r}, but args has {count} entries (from 0)")
        out.add(number % count)
    return out


def _constants(jaxpr: Any) -> list[Any]:
    """Arrays that a program holds, also those of the jitted functions and loops in it, each once."""
    found: dict[int, Any] = {}
    waiting = [jaxpr]
    while waiting:
        here = waiting.pop()
        found |= {id(constant): constant for constant in getattr(here, "consts", ())}
        for equation in here.eqns:
            for value in equation.params.values():
                several = value if isinstance(value, tuple | list) else (value,)
                waiting += [each for each in several if hasattr(each, "eqns")]
    return list(found.values())


def _call(flat: Callable[..., Any], *arrays: Any) -> Any:
    return flat(*arrays)


def _described(leaf: Any) -> Any:
    import jax
    import numpy as np

    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
        # As jit takes Python's numbers.
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bytes(leaf: Any) -> int:
    import jax

    key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return math.prod(leaf.shape) * (4 if key else leaf.dtype.itemsize)


def _mesh_axes(spec: Sequence[Any]) -> Iterator[str]:
    """The mesh axes of one array's dimensions."""
    for entry in spec:
        yield from [entry] if isinstance(entry, str) else entry or []
