"""A layout as a Python file of its own: the mesh, and a ``NamedSharding`` for every array of a training step.

The file imports jax and numpy only. It is written for programs other than capibara's: arrays are found by their paths,
and what has another name there is renamed in the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capibara.plan.errors import PlanError
from capibara.plan.isolated import isolated

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.plan.slices import Slice
    from capibara.sharding import Layout

__all__ = ["named_sharding_code"]

_POLICIES = {
    "none": "None",
    "dots": "jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
    "full": "jax.checkpoint_policies.nothing_saveable",
}


def named_sharding_code(
    config: ModularModelConfig,
    layout: Layout,
    target: Slice,
    *,
    slices: int = 1,
    coordinates: tuple[tuple[int, ...], ...] = (),
) -> str:
    """The source of a Python file with the shardings of a configuration's training step.

    Its shardings are those of :class:`capibara.train.placement.Placement`, which training uses.

    Args: as for :func:`capibara.plan.export.export_layout`.

    Raises:
      PlanError: the layout's mesh does not have as many devices as the slices; the step cannot be traced.
    """
    devices = target.num_devices * slices
    if layout.num_devices != devices:
        raise PlanError(
            f"layout: the mesh {dict(layout.mesh)} has {layout.num_devices} devices, expected {devices}: "
            f"{slices} × {target}"
        )
    found, _ = isolated(lambda: (_arrays(config, layout), b""), what="describing the training state")
    title = f"{config.model.num_layers} layers of width {config.model.embed_dim}"
    place = target.text if slices == 1 else f"{slices} slices {target.text}"
    return _TEMPLATE.format(
        title=title,
        place=place,
        layout=layout,
        mesh=_dict(dict(layout.mesh)),
        slices=slices,
        coordinates=_coordinates(coordinates),
        microbatches=layout.microbatches,
        rows=config.train.batch_size,
        length=config.train.sequence_length,
        remat=layout.remat,
        policy=_POLICIES[layout.remat],
        unrolled=config.model.scan_layers == "unroll",
        exchange=_exchanged(config),
        options=_dict(layout.compiler_options),
        state=_table(found["state"]),
        batch=_table(found["batch"]),
    )


def _exchanged(config: ModularModelConfig) -> str:
    """The dtype in which devices sum their parts of the gradients of linear layers."""
    precision = config.precision
    return precision.compute_dtype if precision.exchange == "compute" else precision.accumulate_dtype


def _arrays(config: ModularModelConfig, layout: Layout) -> dict[str, Any]:
    """Path, shape, dtype, spec and memory of every array of the step's arguments."""
    import jax

    from capibara.core import ModularCapibaraModel
    from capibara.data.packed import decided, is_packed
    from capibara.plan.workloads.training import batch_arrays
    from capibara.train.placement import Placement
    from capibara.train.run import Run

    names, sizes = zip(*layout.mesh, strict=True)
    mesh: Any = jax.sharding.AbstractMesh(sizes, names)
    settings = config.replace(model=config.model.replace(remat=layout.remat))
    placement = Placement((), mesh, layout)
    placement.check_rows(settings.train.batch_size)
    run = Run(settings, placement, ModularCapibaraModel(settings, mesh=mesh, rules=placement.rules))
    batch = batch_arrays(settings, placement, layout.microbatches, packed=is_packed(decided(config.data)))
    return {"state": _described(run.state), "batch": _described(batch)}


def _described(tree: Any) -> list[list[Any]]:
    import jax

    return [
        [
            jax.tree_util.keystr(path, simple=True, separator="."),
            list(leaf.shape),
            str(leaf.dtype),
            [list(entry) if isinstance(entry, tuple) else entry for entry in leaf.sharding.spec],
            leaf.sharding.memory_kind,
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _table(arrays: list[list[Any]]) -> str:
    lines = []
    for path, shape, dtype, spec, memory in arrays:
        entries = ", ".join(repr(tuple(entry) if isinstance(entry, list) else entry) for entry in spec)
        where = f", {memory!r}" if memory not in (None, "device") else ""
        lines.append(f"    {path!r}: Array({tuple(shape)!r}, {dtype!r}, P({entries}){where}),")
    return "\n".join(lines)


def _dict(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in values.items()) + "}"


def _coordinates(coordinates: tuple[tuple[int, ...], ...]) -> str:
    if not coordinates:
        return "()"
    words = [repr(tuple(each)) for each in coordinates]
    lines = [", ".join(words[at : at + 8]) for at in range(0, len(words), 8)]
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ")"


_TEMPLATE = '''\
"""Shardings of a training step ({title}) on {place}, planned by capibara.

{layout}

Needs jax and numpy only. Run as a program, it prints every array's sharding and the bytes on each device:
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=N does so without the slice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Axes of the mesh, outermost first. Over several slices, the outermost axis goes over them.
MESH = {mesh}
SLICES = {slices}
# Of each device of a slice on its grid of chips, in the order of the mesh, as in the program that was compiled (in the
# core view with the core's number); empty: as mesh_utils arranges them.
COORDINATES = {coordinates}

# A step takes BATCH_SIZE rows of SEQUENCE_LENGTH tokens, in MICROBATCHES parts one after another.
BATCH_SIZE = {rows}
SEQUENCE_LENGTH = {length}
MICROBATCHES = {microbatches}

# What the backward pass recomputes of each block: {remat!r}.
REMAT = {remat!r}
REMAT_POLICY = {policy}

# Whether blocks are compiled one by one, not as one body of a loop.
UNROLLED = {unrolled}

# The dtype in which the devices' parts of the gradients of linear layers' weights are summed.
GRADIENT_DTYPE = {exchange!r}

# Options of the TPU compiler: jax.jit(step, compiler_options=COMPILER_OPTIONS).
COMPILER_OPTIONS = {options}


class Array(NamedTuple):
    """Shape, dtype and partition of an array, and the kind of memory that holds it between steps."""

    shape: tuple[int, ...]
    dtype: str
    spec: P
    memory: str = "device"


# Parameters, optimizer state and the rest of the training state, by path.
STATE = {{
{state}
}}

# Arguments of a step, all microbatches stacked: [microbatches, rows, ...].
BATCH = {{
{batch}
}}


def make_mesh(devices: Any = None) -> Mesh:
    """The mesh over the first devices of each slice (by default of all that JAX has)."""
    count = math.prod(MESH.values())
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < count:
        raise ValueError(f"the mesh {{MESH}} needs {{count}} devices, got {{len(devices)}}")
    slices: dict[int, list[Any]] = {{}}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    each = count // SLICES
    groups = [slices[number][:each] for number in sorted(slices)][:SLICES]
    if len(groups) < SLICES:  # devices that know no slices, such as emulated ones
        groups = [devices[at * each : (at + 1) * each] for at in range(SLICES)]
    sizes = list(MESH.values())
    sizes[0] //= SLICES
    return Mesh(np.concatenate([_arranged(sizes, group) for group in groups]), tuple(MESH))


def _arranged(sizes: list[int], devices: list[Any]) -> np.ndarray:
    if COORDINATES and all(hasattr(device, "coords") for device in devices):
        cores = len(COORDINATES[0]) > 3
        places = {{
            (*device.coords, device.core_on_chip) if cores else tuple(device.coords): device for device in devices
        }}
        if all(place in places for place in COORDINATES):
            found = np.empty(len(COORDINATES), object)
            found[:] = [places[place] for place in COORDINATES]
            return found.reshape(sizes)
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):
        return np.array(devices).reshape(sizes)


def shardings(mesh: Mesh, arrays: dict[str, Array]) -> dict[str, NamedSharding]:
    """The sharding of each array of STATE or BATCH, by path."""
    kinds = {{memory.kind for memory in mesh.devices.flat[0].addressable_memories()}}
    found = {{}}
    for path, array in arrays.items():
        sharding = NamedSharding(mesh, array.spec)
        if array.memory != "device" and array.memory in kinds:
            sharding = sharding.with_memory_kind(array.memory)
        found[path] = sharding
    return found


def shardings_like(tree: Any, mesh: Mesh, arrays: dict[str, Array], prefix: str = "") -> Any:
    """A tree of shardings for a tree of arrays whose paths and shapes are those of STATE or BATCH.

    For instance ``shardings_like(params, mesh, STATE, "params")``, for in_shardings or jax.device_put.
    """
    known = shardings(mesh, arrays)

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = f"{{prefix}}.{{name}}" if prefix and name else prefix or name
        if name not in arrays:
            raise KeyError(f"{{name}} is not among the planned arrays; rename it in the table")
        if tuple(leaf.shape) != arrays[name].shape:
            raise ValueError(f"{{name}} has the shape {{tuple(leaf.shape)}}, planned {{arrays[name].shape}}")
        return known[name]

    return jax.tree_util.tree_map_with_path(one, tree)


def checkpointed(block: Any) -> Any:
    """A block of the model that recomputes in the backward pass what the plan says."""
    return block if REMAT == "none" else jax.checkpoint(block, policy=REMAT_POLICY)


def main() -> None:
    mesh = make_mesh()
    for title, arrays in (("state", STATE), ("batch", BATCH)):
        total = 0
        for path, sharding in shardings(mesh, arrays).items():
            array = arrays[path]
            part = sharding.shard_shape(array.shape)
            size = 8 if array.dtype.startswith("key") else jax.numpy.dtype(array.dtype).itemsize
            total += math.prod(part) * size
            print(f"{{path}}: {{array.dtype}}{{list(array.shape)}} {{array.spec}}, on each device {{list(part)}}")
        print(f"{{title}}: {{total / 2**30:.3f}} GiB a device")


if __name__ == "__main__":
    main()
'''
