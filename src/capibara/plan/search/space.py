"""All possible layouts of a training step on a slice or host."""

from __future__ import annotations

from collections.abc import Iterator

from capibara.config import ModularModelConfig
from capibara.plan.slices import ASYNCHRONOUS, WHOLE_PRODUCTS
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = ["ASYNCHRONOUS", "WHOLE_PRODUCTS", "layouts", "meshes", "microbatch_counts"]


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
        if not target.plans_host_memory:
            continue
        # The last resort: the least memory on the device, and the moments in the hosts'.
        yield Layout(mesh=mesh, remat="full", microbatches=counts[-1], offload="optimizer", flags=choices[0])


def microbatch_counts(rows: int, data: int) -> Iterator[int]:
    """Numbers of microbatches into which a batch divides, the least first.

    Args:
      rows: of the batch.
      data: devices that have rows of their own.
    """
    if rows % data == 0:
        yield from (n for n in range(1, rows // data + 1) if rows // data % n == 0)
