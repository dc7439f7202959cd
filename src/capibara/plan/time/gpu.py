"""How long single things take on a GPU of a host: a stated model, from published figures, not calibrated on GPUs.

An operation runs as one kernel: its floating-point operations at a share of the tensor cores' peak, or its bytes at a
share of the memory's bandwidth, whichever is longer, and a fixed time for starting it. Collectives are NCCL's, over
NVLink through NVSwitch. The compiler does not tune products without the device, so that the kernel that it writes down
for a product is not the one that runs there: only what is multiplied counts here.

The range: ``low`` is everything at its peak, with kernels that start in a microsecond; ``high`` overlaps no collective
with work, starts each kernel as if alone and gives foreign kernels half of their rate. What the model leaves out: power
limits and the clocks that they lower, the processors that NCCL takes from computation, waiting for the host where a
branch depends on data, and products that are small or narrow beyond what starting a kernel says of them.

Sources of the constants:

- *Products*: cuBLAS as measured for XLA's own cost model on H100 (openxla/xla,
  ``service/gpu/model/matmul_interpolator_data.h``, sm_90): bfloat16 up to 779 TFLOP/s, 0.79 of the peak, and float32
  through the tensor cores' TF32 up to 322, 0.65 of that peak. ``FLOPs / (0.79 · peak) + 6 µs`` is within 25 % of the
  times in that table (37 % for float32; a test has 20 of them). float8: 1,301 TFLOP/s on H200, 0.66 (8192³ with
  random numbers; Azure/AI-benchmarking-guide, ``ND_H200_v5_results.md``). B200: 0.776 for bfloat16 and 0.763 for
  float8, "Maximum Achievable Matmul FLOPS" in Bekman, "Machine Learning Engineering" (stas00/ml-engineering,
  ``compute/accelerator``), where H100 has 0.803; its TF32 as on H100.
- *Memory*: BabelStream's triad reaches 4.15 of an H200's 4.8 TB/s (the same results of Azure): 0.865, for all.
- *Starting a kernel*: 6 µs alone, by the first table and by that of collectives (a copy within one GPU: 6.2 µs).
  Launches overlap with the kernels before ("Getting Started with CUDA Graphs", NVIDIA technical blog: 3.8 instead of
  9.6 µs for a kernel of 2.9): 1 µs at best. Half of the 6 is taken.
- *Links*: NCCL reaches 370 of the 450 GB/s of an H100's links ("bus bandwidth"; NVIDIA/nccl-tests, issue 212), which is
  20.6 GB/s a link; 40.1 on B200 (NCCL's ``src/graph/topo.h``; NVIDIA/nccl, issue 1807). With NVLink SHARP the switch
  adds up: an all-reduce over 8 GPUs has a bus bandwidth of 480 GB/s on H100 (nccl-tests, issue 212) and H200 (Azure,
  8 GB), 830 on B200 (nccl, issue 1807).
- *Latency*: 6 µs and 2 µs for each step of a ring: an all-gather or reduce-scatter of up to 64 KiB over 8 H100 takes 19
  to 22 µs, an all-reduce 24 to 45 µs (openxla/xla, ``service/gpu/model/collective_interpolator_data.h``, sm_90).
- *Host*: 52 GB/s to and from its memory (Azure, H200).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from capibara.hardware import roofline
from capibara.plan.errors import PlanError
from capibara.plan.gpus import GpuHost
from capibara.plan.program.facts import Collective, Kernel, Piece
from capibara.plan.program.groups import mesh_axes_of

__all__ = ["GpuModel", "GpuRates", "model_of"]

# HLO's element types by those of the catalogue's peaks. A float32 product runs as TF32, as JAX's default precision has
# it on these GPUs.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "tf32",
    "f64": "float64",
    "s8": "int8",
    "u8": "int8",
    "s4": "int8",
    "f8e4m3fn": "float8",
    "f8e5m2": "float8",
}
_SWITCH = frozenset({"NVLink"})


@dataclass(frozen=True)
class GpuModel:
    """Constants of a GPU; their sources are those of this module.

    Attributes:
      products: share of the peak that large matrix products reach, by dtype.
      memory: share of the memory's bandwidth.
      launch: seconds for starting a kernel. launch_best, launch_worst: the range.
      ring: bytes a second that NCCL sends from one GPU around a ring.
      switch: bytes a second when the switch adds up (NVLink SHARP), see :meth:`all_reduce`.
      latency: seconds of a collective besides its steps. step: of each step of a ring.
      host: bytes a second to or from the host's memory.
    """

    products: tuple[tuple[str, float], ...]
    ring: float
    switch: float
    memory: float = 0.865
    launch: float = 3e-6
    launch_best: float = 1e-6
    launch_worst: float = 6e-6
    latency: float = 6e-6
    step: float = 2e-6
    host: float = 52e9

    def gather(self, size: float, members: int) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size`` bytes in all, around a ring."""
        if members < 2:
            return 0.0
        return size * (members - 1) / members / self.ring + self.latency + (members - 1) * self.step

    def all_reduce(self, size: float, members: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes: around a ring, or in the switch if that is faster.

        Around a ring it is a reduce-scatter and an all-gather. In the switch each GPU sends all of its array and gets
        an ``n``-th of the sum, and the same the other way round.
        """
        if members < 2:
            return 0.0
        ring = 2 * size * (members - 1) / members / self.ring
        switch = size * (1 + 1 / members) / self.switch
        return min(ring, switch) + self.latency + 2 * (members - 1) * self.step

    def exchange(self, size: float, members: int) -> float:
        """Seconds of an all-to-all of arrays of ``size`` bytes: each sends a part to every other, all at once."""
        if members < 2:
            return 0.0
        return size * (members - 1) / members / self.ring + self.latency + self.step

    def send(self, size: float) -> float:
        """Seconds for sending ``size`` bytes to another GPU."""
        return size / self.ring + self.latency + self.step


_LINKS = 18
_HOPPER = (("bfloat16", 0.79), ("float16", 0.79), ("tf32", 0.65), ("float8", 0.66), ("int8", 0.66))
_BLACKWELL = (("bfloat16", 0.776), ("float16", 0.776), ("tf32", 0.65), ("float8", 0.763), ("int8", 0.763))


def _switch(bus: float, members: int = 8) -> float:
    """``switch`` from the bus bandwidth of an all-reduce, which nccl-tests defines as that of a ring."""
    seconds = 2 * (members - 1) / members / bus  # of a byte
    return (1 + 1 / members) / seconds


_MODELS = {
    "h100": GpuModel(products=_HOPPER, ring=_LINKS * 20.6e9, switch=_switch(480e9)),
    "h200": GpuModel(products=_HOPPER, ring=_LINKS * 20.6e9, switch=_switch(480e9)),
    "b200": GpuModel(products=_BLACKWELL, ring=_LINKS * 40.1e9, switch=_switch(830e9)),
}


def model_of(target: GpuHost) -> GpuModel:
    """The constants of a host's GPUs.

    Raises:
      PlanError: none are known.
    """
    if target.generation not in _MODELS:
        raise PlanError(f"there is no model of the time on {target.generation}, only on {', '.join(_MODELS)}")
    return _MODELS[target.generation]


@dataclass
class GpuRates:
    """How long single things take on a host of GPUs.

    Attributes:
      target, mesh: where the program runs.
      compute, links, kernels: further shares of these rates, as of :class:`~capibara.plan.time.Constants`.
      host: bytes a second to the host's memory, instead of the model's.
      best, worst: which end of the range.
      unknown: what is not included, as text.
    """

    target: GpuHost
    mesh: tuple[tuple[str, int], ...]
    compute: float = 1.0
    links: float = 1.0
    kernels: float = 1.0
    host: float | None = None
    best: bool = False
    worst: bool = False
    unknown: dict[str, None] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = model_of(self.target)
        if self.target.chip.hbm_bandwidth is None:
            raise PlanError(f"{self.target}: the bandwidth of its memory is not known")
        self.bandwidth = self.target.chip.hbm_bandwidth * (1.0 if self.best else self.model.memory)
        self.shares = {name: 1.0 if self.best else share for name, share in self.model.products}
        self.start = (
            self.model.launch_best
            if self.best
            else self.model.launch_worst
            if self.worst
            else self.model.launch
        )
        self._known = {}

    def _kernel(self, flops: int, moved: int, dtype: str) -> float:
        name = _DTYPES.get(dtype, "bfloat16")
        peak = self.target.chip.peak_flops.get(name) or self.target.chip.peak("bfloat16")
        share = self.shares.get(name, self.shares["bfloat16"])
        return roofline(flops, moved, peak * share, self.bandwidth)

    def piece(self, piece: Piece) -> tuple[float, str]:
        """Seconds of an operation, and the source of the figure."""
        return self._kernel(piece.flops, piece.hbm_bytes, piece.dtype) / self.compute + self.start, "roofline"

    def kernel(self, kernel: Kernel) -> tuple[float, str]:
        """Seconds of a call of foreign code: half of the roofline's rate at worst."""
        share = 1.0 if self.best else 0.5 * min(1.0, self.kernels) if self.worst else self.kernels
        return self._kernel(kernel.flops or 0, kernel.bytes, "bf16") / share + self.start, "roofline"

    def copy(self, piece: Piece) -> float:
        """Seconds of a copy between memories."""
        return max(piece.hbm_bytes / self.bandwidth, piece.host_bytes / (self.host or self.model.host))

    def exchange(self, collective: Collective) -> tuple[float, frozenset[Any], str]:
        """Seconds, links that are busy meanwhile, label."""
        key = (collective.kind, collective.bytes, collective.groups)
        if key not in self._known:
            axes = mesh_axes_of(collective.groups, self.mesh)
            label = f"{collective.kind} over {' × '.join(axes) or 'nothing'}"
            # All collectives go through the same links to the switch, one after the other.
            self._known[key] = (self._seconds(collective), _SWITCH, label)
        return self._known[key]

    def _seconds(self, collective: Collective) -> float:
        size, members = collective.bytes / self.links, collective.group_size
        if collective.kind == "collective-permute":
            if all(len(set(pair)) == 1 for pair in collective.groups):
                return 2 * collective.bytes / self.bandwidth + self.start
            return self.model.send(size)
        if collective.kind == "all-reduce":
            return self.model.all_reduce(size, members)
        if collective.kind == "all-to-all":
            return self.model.exchange(size, members)
        return self.model.gather(size, members)
