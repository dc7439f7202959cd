"""Advice on re-sharding from the measured load of the devices of a mesh.

The load of the device in row ``i`` and column ``j`` has a cause that its place tells:

* a whole row or column is loaded: the data of that row (batch positions) or column (hidden positions) is more work.
  Another layout divides it among more devices;
* single devices are: another layout gives them other data and the same slowness. They are checked, and left out.

Which of them it is follows from an analysis of variance: the share of the variance that row means (or column means)
explain, adjusted for their number (Ezekiel's adjusted R²), which is 0 for a single device that stands out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from capibara.config import TPUConfig, TPUError
from capibara.observe.errors import ReshardingError
from capibara.observe.monitor.load import MeasuredLoad, grid_of

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["Pattern", "ReshardingAdvice", "advise_resharding"]

Pattern = Literal["unknown", "balanced", "rows", "columns", "rows and columns", "devices", "unclear"]

_BALANCED = 1.1  # the most loaded device by the mean, up to which a layout is not to blame
_EXPLAINED = 0.5  # share of the variance


@dataclass(frozen=True)
class ReshardingAdvice:
    """What the load of a mesh says about the layout.

    Attributes:
      pattern: where the load differs: ``"rows"`` or ``"columns"`` of the mesh, both, single ``"devices"``; or
        ``"balanced"``, ``"unclear"`` (a mesh of one axis, or too many unknown loads), ``"unknown"`` (no load is known).
      hotspots: positions whose load is greater than ``config.scaling_config.load_threshold``.
      outliers: positions of the most loaded devices: nearer to the greatest load than to the mean.
      most, mean: of the known loads; NaN if there are none.
      spec: the advised sharding of an array [batch, hidden]; None: no other layout is advised.
      specs: the same for each tensor that was given.
      predicted_gain: share of the time that ``spec`` saves, 0 to 1, if the load stays with its batch and hidden
        positions, the most loaded device is waited for, and communication costs the same; 0.0 without ``spec``.
      gain_limit: the share that perfect balance would save: ``1 - mean / most``.
      reason: in a sentence.
      how: what to do, one line each.
      notes: what the figures do not say.
    """

    pattern: Pattern
    hotspots: tuple[tuple[int, int], ...]
    outliers: tuple[tuple[int, int], ...]
    most: float
    mean: float
    spec: PartitionSpec | None
    specs: Mapping[str, PartitionSpec]
    predicted_gain: float
    gain_limit: float
    reason: str
    how: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "pattern": self.pattern,
            "hotspots": [list(one) for one in self.hotspots],
            "outliers": [list(one) for one in self.outliers],
            "most": None if math.isnan(self.most) else self.most,
            "mean": None if math.isnan(self.mean) else self.mean,
            "spec": None if self.spec is None else str(self.spec),
            "specs": {name: str(spec) for name, spec in self.specs.items()},
            "predicted_gain": self.predicted_gain,
            "gain_limit": self.gain_limit,
            "reason": self.reason,
            "how": list(self.how),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.pattern}: {self.reason}"]
        if self.hotspots:
            lines.append(f"  hotspots    {_listed(self.hotspots)}")
        if self.spec is not None:
            lines.append(
                f"  advised     {self.spec}, saves up to {100 * self.predicted_gain:.0f} % of the time"
            )
        lines += [f"  {name:<11} {spec}" for name, spec in self.specs.items()]
        if self.gain_limit > 0 and self.pattern != "balanced":
            lines.append(f"  limit       perfect balance would save {100 * self.gain_limit:.0f} %")
        lines += [f"  do          {step}" for step in self.how]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


def advise_resharding(
    load: Any, config: TPUConfig, tensors: Mapping[str, Any] | None = None
) -> ReshardingAdvice:
    """Say whether the load of a mesh is unbalanced, why, and which layout would balance it.

    A layout that shards the batch over all devices gives each the mean of its row's load; one that shards the hidden
    dimension the mean of its column's. The advised one has the smaller maximum. ``config.optimize_sharding`` follows
    another rule, the one of Capibara's documents, which counts hot positions: ``notes`` say where they differ.

    Args:
      load: of the devices [rows, columns], from :meth:`TpuRealTimeMonitor.load` or as an array; NaN where it is
        unknown. Rows are the first axis of ``config.topology``, columns the others together.
      config: the slice, with the threshold of hotspots.
      tensors: names and shapes of activations, batch first and hidden last (or arrays with such a shape).

    Raises:
      ReshardingError: a load of another shape, negative or infinite; no config; a tensor with fewer than two
        dimensions.
    """
    if not isinstance(config, TPUConfig):
        raise ReshardingError(f"config: got {config!r:.200}, expected a TPUConfig")
    values = _values(load, config)
    shapes = _shapes({} if tensors is None else tensors)
    notes = _notes(load, values)
    hotspots = tuple(config.detect_hotspots(values))
    known = values[~np.isnan(values)]
    if not known.size:
        why = "the load of no device is known"
        if isinstance(load, MeasuredLoad) and load.reasons:
            why += f": {next(iter(load.reasons.values()))}"
        return _nothing("unknown", (), (), math.nan, math.nan, why, (), notes)
    most, mean = float(known.max()), float(known.mean())
    limit = 1 - mean / most if most > 0 else 0.0
    if most <= _BALANCED * mean:
        why = f"the most loaded device has {most:.3g}, the mean is {mean:.3g}"
        remedy = ()
        if len(hotspots) == known.size:
            why += "; all are above the threshold"
            remedy = ("the slice is used well; for more speed: more chips, capibara plan",)
        return _nothing("balanced", hotspots, (), most, mean, why, remedy, notes)
    outliers = _positions(values > (mean + most) / 2)
    pattern = _pattern(values)
    if pattern in ("devices", "unclear"):
        why, how = _to_check(pattern, outliers, load)
        return _nothing(pattern, hotspots, outliers, most, mean, why, how, notes)
    axes: tuple[str, ...] = tuple(config.mesh_axes or ())
    where = f"along {axes[0]!r}" if pattern == "rows" else f"along {', '.join(map(repr, axes[1:]))}"
    if pattern == "rows and columns":
        where = f"along {', '.join(map(repr, axes))}"
    why = f"the load differs {where}: the most loaded device has {most:.3g}, the mean is {mean:.3g}"
    if not hotspots:
        threshold = config.scaling_config.load_threshold
        why += f"; no device is above the threshold, {threshold:g}"
        remedy = (f"for advice on less load: TPUConfig(…, scaling_config=ScalingConfig({0.99 * most:.2g}))",)
        return _nothing(pattern, (), outliers, most, mean, why, remedy, notes)
    # Each device of the new layout has the mean of a row of the old one, or of a column.
    of_batch, of_hidden = _most_mean(values, 1), _most_mean(values, 0)
    over_batch = of_batch <= of_hidden
    gain = 1 - min(of_batch, of_hidden) / most
    if gain <= 0:
        why += "; no layout over all devices would balance it"
        return _nothing(pattern, hotspots, outliers, most, mean, why, (), notes)
    spec = _spec(config, 2, over_batch)
    documented = config.optimize_sharding(values)
    if documented != spec:
        other = max(0.0, 1 - (of_hidden if over_batch else of_batch) / most)
        notes.append(
            f"config.optimize_sharding counts hot positions and gives {documented}: saves up to {100 * other:.0f} %"
        )
    specs = {}
    for name, shape in shapes.items():
        size = shape[0 if over_batch else -1]
        if size % config.num_chips:
            what = "batch" if over_batch else "hidden"
            notes.append(
                f"{name}: its {what} size {size} is not a multiple of {config.num_chips} devices: it stays as it is. "
                f"Pad it to {-(-size // config.num_chips) * config.num_chips}"
            )
            specs[name] = config.get_sharding_spec(shape)
        else:
            specs[name] = _spec(config, len(shape), over_batch)
    notes.append("communication is not in the prediction: compare capibara profile before and after")
    return ReshardingAdvice(
        pattern=pattern,
        hotspots=hotspots,
        outliers=outliers,
        most=most,
        mean=mean,
        spec=spec,
        specs=specs,
        predicted_gain=gain,
        gain_limit=limit,
        reason=why,
        how=_ways(config, over_batch),
        notes=tuple(notes),
    )


def _nothing(
    pattern: Pattern,
    hotspots: tuple[tuple[int, int], ...],
    outliers: tuple[tuple[int, int], ...],
    most: float,
    mean: float,
    reason: str,
    how: tuple[str, ...],
    notes: Sequence[str],
) -> ReshardingAdvice:
    """Advice without another layout."""
    limit = 1 - mean / most if most > 0 else 0.0
    return ReshardingAdvice(
        pattern, hotspots, outliers, most, mean, None, {}, 0.0, limit, reason, how, tuple(notes)
    )


def _values(load: Any, config: TPUConfig) -> np.ndarray:
    try:
        config.detect_hotspots(load)
    except (TPUError, ValueError) as error:
        raise ReshardingError(str(error)) from error
    values = np.asarray(load).astype(np.float64)
    if values.shape != grid_of(config):
        raise ReshardingError(
            f"load: got shape {values.shape}, expected {grid_of(config)}, the rows and columns of the topology "
            f"{config.topology!r}. monitor.load(config) gives it"
        )
    if np.isinf(values).any() or (values < 0).any():
        wrong = values[np.isinf(values) | (values < 0)][0]
        raise ReshardingError(
            f"load: got {wrong:g}, expected finite numbers from 0 on, or NaN where the load is unknown"
        )
    return values


def _shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(tensors, Mapping):
        raise ReshardingError(
            f"tensors: got {tensors!r:.200}, expected names and shapes, such as {{'hidden': (32, 512, 1024)}}"
        )
    found = {}
    for name, given in tensors.items():
        shape = getattr(given, "shape", given)
        try:
            sizes: tuple[int, ...] = tuple(size.__index__() for size in shape)
        except (TypeError, AttributeError):
            sizes = ()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ReshardingError(
                f"tensors[{name!r}]: got {shape!r:.200}, expected at least two sizes from 1 on, [batch, …, hidden]"
            )
        found[str(name)] = sizes
    return found


def _notes(load: Any, values: np.ndarray) -> list[str]:
    notes = []
    missing = int(np.isnan(values).sum())
    if 0 < missing < values.size:
        notes.append(f"the load of {missing} of {values.size} devices is unknown")
    if isinstance(load, MeasuredLoad) and load.metric == "memory_usage":
        notes.append(
            "the load is memory in use, since utilization is not reported: gains are of memory, not time"
        )
    elif isinstance(load, MeasuredLoad):
        notes.append(
            "a device that waits for others in a collective may count as working: steps in lockstep can hide imbalance"
        )
    return notes


def _pattern(values: np.ndarray) -> Pattern:
    rows, columns, both = (_explained(values, *of) for of in ((True, False), (False, True), (True, True)))
    if min(values.shape) == 1 or rows is None or columns is None:
        return "unclear"
    if max(rows, columns) >= _EXPLAINED:
        return "rows" if rows >= columns else "columns"
    return "rows and columns" if both is not None and both >= _EXPLAINED else "devices"


def _explained(values: np.ndarray, rows: bool, columns: bool) -> float | None:
    """Adjusted R² of means of rows and columns; None if no degree of freedom is left."""
    known = ~np.isnan(values)
    total = int(known.sum()) - 1
    used = sum(int(known.any(axis).sum()) - 1 for axis, wanted in ((1, rows), (0, columns)) if wanted)
    if total - used <= 0:
        return None
    centred = values - np.nanmean(values)
    left = centred.copy()
    # By turns (backfitting): with unknown loads the effects are not orthogonal. Without, the first round is exact.
    for _ in range(50):
        before = left.copy()
        for axis, wanted in ((1, rows), (0, columns)):
            if wanted:
                count = np.maximum(known.sum(axis, keepdims=True), 1)
                left = left - np.nansum(left, axis, keepdims=True) / count
        if np.nanmax(np.abs(left - before)) < 1e-12:
            break
    unexplained = float(np.nansum(left**2) / np.nansum(centred**2))
    return 1 - unexplained * total / (total - used)


def _most_mean(values: np.ndarray, axis: int) -> float:
    known = ~np.isnan(values)
    count = known.sum(axis)
    return float((np.nansum(values, axis)[count > 0] / count[count > 0]).max())


def _positions(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    rows, columns = np.nonzero(mask)
    return tuple(zip(rows.tolist(), columns.tolist(), strict=True))


def _listed(positions: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"({row}, {column})" for row, column in positions[:8])
    return shown if len(positions) <= 8 else f"{shown} and {len(positions) - 8} more"


def _to_check(
    pattern: Pattern, outliers: Sequence[tuple[int, int]], load: Any
) -> tuple[str, tuple[str, ...]]:
    places = _listed(outliers)
    if isinstance(load, MeasuredLoad):
        names = [load.name(*place) for place in outliers[:8]]
        places += f" ({', '.join(names)})"
    check = "capibara health, or TpuDiagnostics().run_full_health_check(), while no program has the devices"
    if pattern == "devices":
        why = (
            f"{places} stand out, and no row or column: a slow or failing chip, or other programs on it, "
            "not the layout"
        )
        return why, (
            check,
            "to go on without them: TpuDistributedTrainer.move(devices, rows=…), or TpuAutoScaler(devices=…)",
        )
    why = (
        f"{places} stand out; a mesh of one axis, or so few known loads, cannot tell whether by their data or "
        "their chip"
    )
    return why, (
        check,
        "if they are well, compare with the devices in another order: what moves with the data is the data's",
    )


def _spec(config: TPUConfig, rank: int, over_batch: bool) -> PartitionSpec:
    from jax.sharding import PartitionSpec

    axes, middle = config.mesh_axes or (), [None] * (rank - 2)
    return PartitionSpec(axes, *middle, None) if over_batch else PartitionSpec(None, *middle, axes)


def _ways(config: TPUConfig, over_batch: bool) -> tuple[str, ...]:
    axis = "data" if over_batch else "model"
    return (
        "arrays: jax.device_put(x, NamedSharding(mesh, spec)); inside jax.jit: jax.lax.with_sharding_constraint",
        "a run of capibara train: stop it (Ctrl-C), and give the same command with tpu.enabled=true "
        f"tpu.topology={config.num_chips} tpu.num_chips={config.num_chips} 'tpu.mesh_axes=[\"{axis}\"]'; it goes on "
        "from its newest checkpoint",
        f"TpuDistributedTrainer: one over the new mesh ({axis} {config.num_chips}), then restore(directory)",
    )
