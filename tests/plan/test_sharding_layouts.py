"""Strategies of models whose configuration is known, against what ``plan`` picks among the layouts of the same mesh."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.plan import DoesNotFitError, parse_slice, plan
from capibara.plan.candidate import Candidate
from capibara.plan.memory import estimate_memory
from capibara.plan.search.analytic import estimate_time
from capibara.plan.sharding import ShardingStrategy, create_training_mesh, optimize_sharding_strategy
from capibara.plan.sharding.strategy import bytes_text
from capibara.plan.validation import MeshSizes
from capibara.sharding import Layout

GIB = 2**30
SETTINGS: dict[str, dict[str, Any]] = {
    "1.2 billion": {},
    "1.2 billion, 32 rows": {"train.batch_size": 32},
    "1.2 billion, 8 rows": {"train.batch_size": 8},
    "0.3 billion": {
        "model.embed_dim": 1024,
        "model.num_heads": 8,
        "model.num_kv_heads": 8,
        "model.mlp_dim": 2816,
        "model.remat": "dots",
    },
    "7 billion": {
        "model.embed_dim": 4096,
        "model.num_heads": 32,
        "model.num_layers": 32,
        "model.mlp_dim": 11008,
    },
    "13 billion": {
        "model.embed_dim": 5120,
        "model.num_heads": 40,
        "model.num_layers": 40,
        "model.mlp_dim": 13824,
    },
    "262144 tokens": {"model.vocab_size": 262144},
    "8 experts": {
        "model.num_layers": 12,
        "model.experts.count": 8,
        "model.experts.dim": 2816,
    },
    "8 experts, 64 rows": {
        "model.num_layers": 12,
        "model.experts.count": 8,
        "model.experts.dim": 2816,
        "train.batch_size": 64,
    },
    "ssm": {"model.pattern": ["ssm"]},
}
# Mesh axes in the order of users, with the grid of so many chips.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], str]] = {
    "data 4, model 8": ((4, 8), ("data", "model"), "v4:2x4x4"),
    "data 16, model 2": ((16, 2), ("data", "model"), "v4:2x4x4"),
    "data 8": ((8,), ("data",), "v4:2x2x2"),
    "model 8, fsdp 4": ((8, 4), ("model", "fsdp"), "v4:2x4x4"),
    "rows 4, columns 8": ((4, 8), ("rows", "columns"), "v4:2x4x4"),
}


@cache
def model_of(name: str) -> ModularCapibaraModel:
    return ModularCapibaraModel(ModularModelConfig.from_toml("production/tpu_v4", SETTINGS[name]))


def strategy_of(model: ModularCapibaraModel, mesh: str, **given: Any) -> ShardingStrategy:
    shape, names, _ = MESHES[mesh]
    train = model.config.train
    return optimize_sharding_strategy(
        model, (train.batch_size, train.sequence_length), shape, axis_names=names, **given
    )


@cache
def picks(name: str, grid: str) -> tuple[Candidate, ...] | str:
    """All that ``plan`` has for the whole batch at once, the fastest first; its refusal, where nothing fits."""
    keep = ["model.remat", "train.gradient_accumulation_steps", "tpu.optimizer", "tpu.offload"]
    try:
        found = plan(model_of(name).config, grid, compile=False, keep=keep, top=10_000)
    except DoesNotFitError as error:
        return str(error)
    return found.candidates


def batches(mesh: str, rows: int) -> set[int]:
    """Over how many devices a mesh can shard the batch: those of ``data`` and ``fsdp`` as far as the rows divide."""
    shape, names, _ = MESHES[mesh]
    sizes = dict(zip(names, shape, strict=True))
    found = []
    for k in range(len(names) + 1):
        for axes in itertools.combinations(names, k):
            ways = math.prod(sizes[a] for a in axes)
            if rows % ways == 0:
                found.append((len({"data", "fsdp"} & set(axes)), ways))
    most = max(meant for meant, _ in found)
    return {ways for meant, ways in found if meant == most}


def parts_of(strategy: ShardingStrategy) -> list[tuple[int, ...]]:
    """The shape of a device's part of every array, as JAX has it."""
    mesh = AbstractMesh(strategy.mesh_shape, strategy.axis_names)
    flat = jax.tree.leaves(strategy.shardings(mesh))
    return [s.shard_shape(a.shape) for a, s in zip(strategy, flat, strict=True)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_strategy_is_what_plan_picks_on_the_same_mesh(name: str, mesh: str) -> None:
    model = model_of(name)
    every = picks(name, MESHES[mesh][2])
    allowed = []
    if not isinstance(every, str):
        ways = batches(mesh, model.config.train.batch_size)
        # One number of devices with rows leaves the others to ``model``.
        allowed = [c for c in every if set(c.layout.axis_sizes) == {"data", "model"}]
        allowed = [c for c in allowed if c.layout.axis_sizes["data"] in ways]
    if not allowed and name == "1.2 billion, 8 rows":
        # 8 rows over model 2, and data 16 left: plan divides them over 8 devices, which are no axes of the mesh.
        assert mesh == "data 16, model 2"
        assert strategy_of(model, mesh).layout is None
        return
    if not allowed:
        with pytest.raises(DoesNotFitError, match=r"nothing fits 30\.8 GiB a device"):
            strategy_of(model, mesh)
        return
    best = min(allowed, key=lambda c: c.step_seconds)
    strategy = strategy_of(model, mesh)
    assert strategy.layout == best.layout
    assert strategy.step_seconds == pytest.approx(best.step_seconds)
    assert strategy.memory.total == best.hbm_bytes
    held = sum(math.prod(part) for part in parts_of(strategy)) * 4
    assert strategy.memory.parameters == held == best.memory["parameters"]
    assert strategy.memory.optimizer == pytest.approx(2 * held, abs=8)
    assert sum(a.state_bytes_per_device for a in strategy) == pytest.approx(4 * held)


@pytest.mark.parametrize("mesh", ["data 4, model 8", "model 8, fsdp 4"])
@pytest.mark.parametrize("name", ["1.2 billion", "8 experts", "ssm"])
def test_the_smallest_strategy_is_plans_smallest(name: str, mesh: str) -> None:
    every = picks(name, MESHES[mesh][2])
    assert not isinstance(every, str)
    ways = batches(mesh, 256)
    allowed = [c for c in every if set(c.layout.axis_sizes) == {"data", "model"}]
    least = min(c.hbm_bytes for c in allowed if c.layout.axis_sizes["data"] in ways)
    found = strategy_of(model_of(name), mesh, optimization_target="memory")
    assert found.memory.total == least
    # What fits one byte less is refused.
    with pytest.raises(DoesNotFitError, match="What would make it fit: "):
        strategy_of(model_of(name), mesh, memory_limit_gb=(least - 1) / GIB)
    assert strategy_of(model_of(name), mesh, memory_limit_gb=least / GIB).memory.total == least


@pytest.mark.parametrize(("chip", "grid"), [("tpu-v5p", "v5p:2x2x2"), ("h100-sxm", "h100:8")])
def test_other_chips_have_the_estimates_of_their_plans(chip: str, grid: str) -> None:
    found = strategy_of(model_of("1.2 billion, 32 rows"), "data 8", chip=chip)
    every = picks("1.2 billion, 32 rows", grid)
    assert not isinstance(every, str)
    (same,) = [c for c in every if c.layout == found.layout]
    assert found.memory.total == same.hbm_bytes
    assert found.step_seconds == pytest.approx(same.step_seconds)


def test_adapters_alone_have_gradients_and_moments() -> None:
    model = ModularCapibaraModel(
        ModularModelConfig.from_toml("production/tpu_v4", {"model.num_layers": 2, "finetune.method": "lora"})
    )
    found = optimize_sharding_strategy(model, (256, 2048), (4, 8))
    trained = {a.path for a in found if a.state_bytes_per_device > a.bytes_per_device}
    assert trained == {a.path for a in found if "lora" in a.path}
    assert found.memory.optimizer == pytest.approx(
        2 * sum(a.bytes_per_device for a in found if a.path in trained), abs=8
    )


def test_what_plan_refuses_is_refused_with_remedies_that_hold() -> None:
    model = model_of("7 billion")
    assert isinstance(picks("7 billion", "v4:2x2x2"), str)
    with pytest.raises(DoesNotFitError) as caught:
        strategy_of(model, "data 8")
    text = str(caught.value)
    assert "blocks.mlp.down.weight [32, 11008, 4096]" in text
    remedies = text.rpartition("What would make it fit: ")[2]
    rows = int(remedies.partition("a batch of ")[2].partition(" ")[0])
    assert optimize_sharding_strategy(model, (rows, 2048), (8,)).memory.total <= 30.8 * GIB
    devices = int(remedies.rpartition("devices as ")[2].partition(" ")[0])
    assert optimize_sharding_strategy(model, (256, 2048), (devices,)).memory.total <= 30.8 * GIB


def test_axes_that_plans_know_are_what_they_are_called() -> None:
    """Experts over ``expert``, positions over ``context``, stages over ``pipeline``: the best is plan's."""
    cases = {
        "expert": ("8 experts", (("data", 4), ("expert", 8), ("model", 1)), "v4:2x4x4"),
        "expert alone": ("8 experts, 64 rows", (("data", 1), ("expert", 8), ("model", 1)), "v4:2x2x2"),
        "context": ("1.2 billion, 8 rows", (("data", 8), ("context", 4), ("model", 1)), "v4:2x4x4"),
        "pipeline": ("1.2 billion", (("pipeline", 2), ("data", 16), ("model", 1)), "v4:2x4x4"),
    }
    for case, (name, mesh, grid) in cases.items():
        axis = case.split()[0]
        model = model_of(name)
        rows = model.config.train.batch_size
        pairs = [pair for pair in mesh if pair[1] > 1]
        found = optimize_sharding_strategy(
            model, (rows, 2048), tuple(n for _, n in pairs), axis_names=tuple(a for a, _ in pairs)
        )
        layout = found.layout
        assert layout is not None
        keep = ["model.remat", "tpu.optimizer", "tpu.offload"]
        candidates = plan(model.config, grid, compile=False, keep=keep, top=10_000).candidates
        if axis != "pipeline":  # of which the microbatches are chosen
            candidates = tuple(c for c in candidates if c.layout.microbatches == 1)
        alike = [c for c in candidates if c.layout.mesh == mesh]
        best = min(alike, key=lambda c: c.step_seconds)
        assert layout == best.layout
        assert found.step_seconds == pytest.approx(best.step_seconds)
        named = {a for array in found for e in array.spec for a in ((e,) if isinstance(e, str) else e or ())}
        assert (axis in named) == (axis != "context")


def test_experts_lie_over_their_axis_where_rules_say_so() -> None:
    model = model_of("8 experts")
    mesh = {"data": 4, "expert": 8}
    found = optimize_sharding_strategy(
        model, (256, 2048), tuple(mesh.values()), axis_names=tuple(mesh), rules=AxisRules()
    )
    assert found.layout is not None
    assert found.layout.axis_sizes == {"data": 4, "expert": 8, "model": 1}
    sizes: Any = MeshSizes(mesh)
    specs = {a.path: a.spec for a in found}
    for path, spec in model.compiled.params.items():
        assert specs[".".join(path)] == AxisRules().spec(spec.axes or (), sizes, spec.sizes({}, ""))


def test_activations_follow_a_tensor_axis_of_any_name() -> None:
    """4 rows on 8 × 4 devices: the batch over ``columns``, matrices over ``rows``."""
    model = ModularCapibaraModel(
        ModularModelConfig.from_toml("production/tpu_v4", {"model.num_layers": 2, "train.batch_size": 4})
    )
    found = optimize_sharding_strategy(model, (4, 2048), (8, 4), axis_names=("rows", "columns"))
    assert found.layout is not None
    assert found.layout.axis_sizes == {"data": 4, "model": 8}
    assert (found.batch_axes, found.tensor_axes) == (("columns",), ("rows",))
    assert found["blocks.mlp.down.weight"] == jax.sharding.PartitionSpec(None, "rows", "columns")
    mesh: Any = MeshSizes(found.axis_sizes)
    spec = found.axis_rules().spec(("batch", "sequence", "mlp"), mesh, (4, 64, 5632), kind="activations")
    assert spec == jax.sharding.PartitionSpec("columns", None, "rows")


SMALL = ModularCapibaraModel(
    ModularModelConfig.from_toml(
        "demo",
        {
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.embed_dim": 64,
            "model.mlp_dim": 96,
            "model.num_layers": 4,
        },
    )
)
axes_of = st.lists(
    st.sampled_from(["data", "fsdp", "model", "context", "pipeline", "expert", "left"]),
    min_size=1,
    max_size=3,
    unique=True,
)


@given(
    axes_of,
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=3),
    st.sampled_from([1, 6, 8, 16, 24]),
    st.sampled_from(["throughput", "memory"]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_on_any_mesh_parts_are_equal_and_nothing_listed_is_better(
    names: list[str], sizes: list[int], rows: int, target: Any, ruled: bool
) -> None:
    shape = tuple(sizes[: len(names)])
    rules = AxisRules() if ruled else None
    found = optimize_sharding_strategy(
        SMALL, (rows, 64), shape, 16.0, axis_names=tuple(names), optimization_target=target, rules=rules
    )
    parts = parts_of(found)  # raises where a dimension is not divided
    assert found.memory.parameters == pytest.approx(sum(math.prod(p) * 4 for p in parts))
    assert rows % math.prod(found.axis_sizes[a] for a in found.batch_axes) == 0
    assert found.bound_seconds <= found.step_seconds * (1 + 1e-9)
    assert str(found)
    if found.layout is None:
        return
    assert found.layout.num_devices == math.prod(shape)
    assert math.prod(found.axis_sizes[a] for a in found.tensor_axes) == found.layout.axis_sizes["model"]
    fitting = [a for a in found.alternatives if a.fits]
    if target == "memory":
        assert all(a.memory.total >= found.memory.total for a in fitting)
    else:
        assert all(a.seconds >= found.step_seconds for a in fitting)
    if ruled:
        for path, spec in SMALL.compiled.params.items():
            for name, entry in zip(spec.axes or (), found[".".join(path)], strict=True):
                axes = (entry,) if isinstance(entry, str) else entry or ()
                assert not axes or "+".join(axes) in AxisRules().parameters[str(name)]


def test_the_smallest_pipeline_has_the_microbatches_that_need_the_least() -> None:
    fast, small = (
        optimize_sharding_strategy(
            SMALL, (64, 64), (2, 2), 16.0, axis_names=("pipeline", "data"), optimization_target=target
        )
        for target in ("throughput", "memory")
    )
    assert fast.layout is not None
    assert small.layout is not None
    assert fast.layout.microbatches < small.layout.microbatches == 16
    assert small.memory.total < fast.memory.total / 4
    assert small.bound_seconds == fast.bound_seconds
    with pytest.raises(DoesNotFitError, match="the smallest layout found takes") as caught:
        limit = (small.memory.total - 1) / GIB
        optimize_sharding_strategy(SMALL, (64, 64), (2, 2), limit, axis_names=("pipeline", "data"))
    assert f"takes {small.memory}" in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 2), (4, 8)])
def test_remedies_without_a_layout_are_not_listed(shape: tuple[int, int]) -> None:
    """Half of 32 rows on 4 × 8 devices, or 32 rows on more: the four heads are not divided over the rest."""
    with pytest.raises(DoesNotFitError) as caught:
        optimize_sharding_strategy(SMALL, (32, 64), shape, 1e-6, axis_names=("data", "columns"))
    said = str(caught.value)
    assert "inf" not in said
    assert "remat='full'" in said
    # 64 × 2 devices have no layout, 32 × 2 have.
    assert ("64 devices as 32x2" in said) == (shape == (2, 2))
    assert ("All together still would not" in said) == (shape == (4, 8))


def test_a_layout_is_estimated_once_however_many_axes_are_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "capibara.plan.sharding.layouts.estimate_memory",
        lambda config, layout, target: seen.append(layout) or estimate_memory(config, layout, target),
    )
    found = optimize_sharding_strategy(SMALL, (16, 64), (2, 2, 2, 2), 1.0, axis_names=("a", "b", "c", "d"))
    assert len(found.alternatives) > 2 * len(seen)
    assert len(set(seen)) == len(seen)


def test_settings_are_the_models_own_unless_they_are_given() -> None:
    model = model_of("1.2 billion")

    def of(**given: Any) -> ShardingStrategy:
        return strategy_of(model, "data 4, model 8", **given)

    own, again = (
        of(),
        of(remat="full", compute_dtype="bfloat16", accumulate_dtype="float32", optimizer_bytes=8),
    )
    assert own.to_dict()["memory_bytes"] == again.to_dict()["memory_bytes"]
    assert own.step_seconds == again.step_seconds
    assert of(optimizer_bytes=2).memory.optimizer == pytest.approx(own.memory.optimizer / 4, rel=1e-6)
    assert of(remat="none", memory_limit_gb=200.0).memory.activations > 5 * own.memory.activations
    wide = ModularCapibaraModel(model.config.with_overrides(["precision.compute_dtype=float32"]))
    assert strategy_of(wide, "data 4, model 8").memory.activations == 2 * own.memory.activations
    slow = of(link_bandwidth=1e9)
    assert slow.communication_seconds == pytest.approx(own.communication_seconds * 45, rel=0.05)
    with pytest.raises(ConfigError, match="link_bandwidth="):
        of(link_bandwidth=-1.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"optimization_target": "latency"}, "forward only"),
        ({"training": False}, "forward only"),
        (
            {"rules": AxisRules(parameters={**AxisRules().parameters, "mlp": ()}), "memory_limit_gb": 100.0},
            "nothing overlapped",
        ),
        ({"chip": "tpu-v3", "link_bandwidth": 1e11, "memory_limit_gb": 100.0}, "Google TPU v3"),
    ],
)
def test_other_steps_than_plans_have_are_searched_array_by_array(given: dict[str, Any], why: str) -> None:
    found = strategy_of(model_of("1.2 billion"), "data 4, model 8", **given)
    assert found.layout is None
    assert any(why in text for text in found.assumptions)
    assert found.communication_seconds == pytest.approx(sum(a.seconds for a in found))


def test_sizes_have_no_exponents() -> None:
    assert [bytes_text(n * 1024) for n in (999.4, 999.6, 1023)] == ["999 KiB", "1,000 KiB", "1,023 KiB"]


def test_a_training_mesh_of_one_device_needs_no_axes() -> None:
    mesh = create_training_mesh(1)
    found = optimize_sharding_strategy(
        SMALL, (8, 64), tuple(mesh.shape.values()), axis_names=tuple(mesh.shape), memory_limit_gb=1.0
    )
    assert found.layout is not None
    assert found.layout.mesh == (("data", 1), ("model", 1))
    assert found.communication_seconds == 0
    assert not found.alternatives


# ---- parameters over ``fsdp`` alone, copies of them over ``data`` --------------------------------------------------

V4 = parse_slice("v4:2x4x4")


def over(data: int, fsdp: int = 0, **more: Any) -> Layout:
    mesh = (("data", data), *((("fsdp", fsdp),) if fsdp else ()), ("model", 1))
    return Layout(mesh=mesh, **more)


def ring(size: float, devices: int) -> float:
    """Seconds of a gather around a ring of v4's links, both ways; two neighbours have one link."""
    links = 45e9 * min(devices - 1, 2)
    return size * (devices - 1) / devices / links if devices > 1 else 0.0


def test_gradients_are_reduced_over_copies_by_hand() -> None:
    model = model_of("1.2 billion")
    count = sum(math.prod(spec.sizes({}, "")) for spec in model.compiled.params.values())
    for data, fsdp in ((4, 8), (16, 2), (2, 16)):
        found = estimate_time(model.config, over(data, fsdp), V4)
        gathers = 2 * 0.4 * ring(count * 2, fsdp)  # in bfloat16, most of it behind the neighbouring layers
        gradients = ring(count * 4, fsdp) + 2 * ring(count / fsdp * 4, data)
        assert found.communication == pytest.approx(gathers + gradients)
        assert estimate_memory(model.config, over(data, fsdp), V4).parameters == count * 4 / fsdp
        whole = estimate_time(model.config, over(32), V4)
        assert found.compute == whole.compute


def test_an_fsdp_axis_without_copies_is_a_data_axis() -> None:
    config = model_of("1.2 billion").config
    choices: list[dict[str, Any]] = [
        {},
        {"parameters": "replicated"},
        {"parameters": "replicated", "optimizer": "sharded"},
    ]
    for more in choices:
        one, other = over(32, **more), over(1, 32, **more)
        assert estimate_time(config, one, V4) == estimate_time(config, other, V4)
        assert estimate_memory(config, one, V4) == estimate_memory(config, other, V4)
    whole = over(4, 8, parameters="replicated")
    assert estimate_time(config, whole, V4) == estimate_time(config, over(32, parameters="replicated"), V4)


def test_gradients_that_wait_are_whole_once() -> None:
    """Of two kinds of blocks, those of a turn wait to be reduced: each whole, however it is stored."""
    config = ModularModelConfig.from_toml(
        "production/tpu_v4",
        {"model.pattern": ["local", "attention"], "model.window": 1024, "train.batch_size": 32},
    )
    full, part = (estimate_memory(config, layout, V4) for layout in (over(32), over(4, 8)))
    assert full.temporaries is not None
    assert part.temporaries is not None
    # Beside them the parts of parameters in bfloat16.
    copies = (part.parameters - full.parameters) / 2
    assert part.temporaries - full.temporaries <= copies


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_copies_over_data_leave_a_devices_memory(remat: Any, tied: bool, microbatches: int) -> None:
    """8 devices with 32 rows; and four times as many of both, each with a copy."""
    settings = {"model.tie_embeddings": tied, "model.num_layers": 4, "train.sequence_length": 512}
    found = []
    for copies, target in ((1, parse_slice("v4:2x2x2")), (4, V4)):
        config = ModularModelConfig.from_toml(
            "production/tpu_v4", {**settings, "train.batch_size": 32 * copies}
        )
        layout = over(copies, 8, remat=remat, microbatches=microbatches)
        found.append(estimate_memory(config, layout, target))
    assert found[0] == found[1]
