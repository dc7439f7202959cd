"""All possible layouts of a training step on a slice or host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capibara.config import ModularModelConfig
from capibara.plan.slices import ASYNCHRONOUS, WHOLE_PRODUCTS
from capibara.plan.stages import can_have_stages
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = [
    "ASYNCHRONOUS",
    "WHOLE_PRODUCTS",
    "can_have_ring",
    "layouts",
    "meshes",
    "microbatch_counts",
    "stage_counts",
]

# Positions of a row that a device has at least where these are divided: the scores of fewer are small products.
_LEAST_POSITIONS = 512
# Microbatches for each stage of a pipeline, at most: beyond that the bubble is less than a ninth of a step.
_MOST_TURNS = 8


def meshes(devices: int, heads: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """``data × model`` with every divisor of the devices, ``model`` up to the number of heads."""
    for model in range(1, min(devices, max(heads, 1)) + 1):
        if devices % model == 0 and heads % model == 0:
            yield (("data", devices // model), ("model", model))


def _meshes_of(config: ModularModelConfig, devices: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """:func:`meshes`; of a model with experts also with an axis for them, whose size divides their number."""
    count = config.model.experts.count
    for mesh in meshes(devices, config.model.num_heads):
        yield mesh
        sizes = dict(mesh)
        for experts in range(2, min(sizes["data"], count) + 1):
            if sizes["data"] % experts == 0 and count % experts == 0:
                yield (("data", sizes["data"] // experts), ("expert", experts), ("model", sizes["model"]))


def _rings_of(config: ModularModelConfig, devices: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """:func:`meshes` with an axis for the positions of each row, where attention can go round it.

    Only with so many positions a device that its products are large.
    """
    length = config.train.sequence_length
    for context in range(2, devices + 1):
        if devices % context or length // context < _LEAST_POSITIONS or not can_have_ring(config, context):
            continue
        for data, model in meshes(devices // context, config.model.num_heads):
            yield (data, ("context", context), model)


def can_have_ring(config: ModularModelConfig, context: int) -> bool:
    """Whether attention can go round so many devices, each with its part of a row's positions."""
    m = config.model
    attends = not m.experts.count and set(m.block_kinds) <= {"attention", "local"}
    return attends and config.train.sequence_length % context == 0


def _pipelines_of(config: ModularModelConfig, devices: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """:func:`meshes` with an axis for stages, where the blocks divide into them."""
    for stages in range(2, min(devices, config.model.num_layers) + 1):
        if devices % stages == 0 and can_have_stages(config, stages):
            for mesh in meshes(devices // stages, config.model.num_heads):
                yield (("pipeline", stages), *mesh)


def layouts(config: ModularModelConfig, target: Target) -> Iterator[Layout]:
    """The product of meshes, sharding, rematerialisation, microbatches, optimizer sharding and offload.

    Equivalent layouts (sharding over one device) and impossible ones (rows that do not divide) are omitted.
    """
    rows = config.train.batch_size
    for mesh in _meshes_of(config, target.num_devices):
        data = dict(mesh)["data"] * dict(mesh).get("expert", 1)
        if rows % data:
            continue
        counts = list(microbatch_counts(rows, data))
        yield from _on_mesh(mesh, counts, data, target)
        if target.plans_host_memory:
            # The last resort: the least memory on the device, and the moments in the hosts'.
            yield Layout(
                mesh=mesh,
                remat="full",
                microbatches=counts[-1],
                offload="optimizer",
                flags=target.flag_choices(mesh)[0],
            )
    for mesh in _rings_of(config, target.num_devices):
        data = dict(mesh)["data"]
        if rows % data == 0:
            # Of several rows a device would rather have a whole one.
            yield from _on_mesh(mesh, [rows // data], data, target)
    for mesh in _pipelines_of(config, target.num_devices):
        data, stages = dict(mesh)["data"], dict(mesh)["pipeline"]
        yield from _on_mesh(mesh, stage_counts(rows, data, stages), data, target)


def _on_mesh(
    mesh: tuple[tuple[str, int], ...], counts: Sequence[int], data: int, target: Target
) -> Iterator[Layout]:
    choices = target.flag_choices(mesh)
    for count in counts:
        for remat in ("none", "dots", "full"):
            for flags in choices:
                yield Layout(mesh=mesh, remat=remat, microbatches=count, flags=flags)
            if data > 1:
                for optimizer in ("as parameters", "sharded"):
                    yield Layout(
                        mesh=mesh,
                        parameters="replicated",
                        optimizer=optimizer,
                        remat=remat,
                        microbatches=count,
                        flags=choices[0],
                    )


def microbatch_counts(rows: int, data: int) -> Iterator[int]:
    """Numbers of microbatches into which a batch divides, the least first.

    Args:
      rows: of the batch.
      data: devices that have rows of their own.
    """
    if rows % data == 0:
        yield from (n for n in range(1, rows // data + 1) if rows // data % n == 0)


def stage_counts(rows: int, data: int, stages: int) -> list[int]:
    """The numbers of microbatches that are considered for a pipeline.

    Args: as of :func:`microbatch_counts`; stages: of the pipeline.
    """
    counts = [n for n in microbatch_counts(rows, data) if n <= _MOST_TURNS * stages]
    # Of fewer than stages, most of which would wait, as many as there can be.
    return [n for n in counts if n >= stages] or counts[-1:]
