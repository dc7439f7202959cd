"""The memory of a step by arithmetic."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.config import ModularModelConfig
from capibara.errors import CapibaraError
from capibara.plan import PlanError, parse_slice
from capibara.plan.memory import MemoryEstimate, estimate_memory, estimate_memory_of
from capibara.plan.memory.arguments import part_of, step_arguments
from capibara.plan.memory.tiles import padded_bytes
from capibara.sharding import Layout
from capibara.sharding.communication import FUSED, whole_products

PRODUCTION = (
    Path(__file__).parents[2] / "src" / "capibara" / "config" / "configs_toml" / "production" / "tpu_v4.toml"
)
V4 = parse_slice("v4:2x2x4")


def config(**model):
    whole = ModularModelConfig.from_toml(PRODUCTION)
    return whole.replace(model=whole.model.replace(**model), train=whole.train.replace(batch_size=64))


def layout(data=4, model=4, **more):
    return Layout(mesh=(("data", data), ("model", model)), **more)


# ---- tiles: sizes that libtpu 0.0.42 gave to arguments of these shapes ------------------------------------------


@pytest.mark.parametrize(
    ("shape", "item", "size"),
    [
        ((4, 96, 3, 64), 4, 393216),  # laid out as [4, 3, 64, 96 -> 128]
        ((4, 96, 1, 64), 4, 131072),
        ((128, 96), 4, 49152),
        ((4, 96), 4, 2048),
        ((96,), 4, 512),
        ((1, 8, 257), 4, 12288),
        ((), 4, 512),
        ((2,), 4, 512),
        ((1, 4, 2049), 4, 34816),
        ((1, 1, 2049), 4, 8704),
        ((24, 5632, 128), 4, 24 * 5632 * 128 * 4),
    ],
)
def test_arrays_take_what_the_compiler_gives_them(shape, item, size):
    assert padded_bytes(shape, item) == size


@given(st.lists(st.integers(1, 300), max_size=4), st.sampled_from([1, 2, 4]))
def test_padding_never_loses_a_number_and_begins_at_512(shape, item):
    size = padded_bytes(shape, item)
    count = item
    for n in shape:
        count *= n
    assert size >= count
    assert size % 512 == 0


def test_nothing_takes_nothing():
    assert padded_bytes((4, 0, 128), 4) == 0


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        layout(),
        layout(16, 1, parameters="replicated", optimizer="sharded"),
        layout(2, 8, microbatches=4, offload="optimizer"),
    ],
)
@pytest.mark.parametrize("pattern", [("attention",), ("attention", "ssm", "vq")])
def test_arguments_are_those_of_the_lowered_step(given, pattern):
    """The oracle: the trainer's own step, lowered for an abstract mesh of the same sizes."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    from capibara.core import ModularCapibaraModel
    from capibara.train.optimizer import build_optimizer

    small = config(
        pattern=pattern,
        num_layers=len(pattern),
        embed_dim=128,
        num_heads=8,
        num_kv_heads=8,
        head_dim=16,
        mlp_dim=256,
        vocab_size=512,
    )
    model = ModularCapibaraModel(small.replace(tpu=small.tpu.replace(enabled=False)))
    mesh = jax.sharding.AbstractMesh(tuple(n for _, n in given.mesh), tuple(a for a, _ in given.mesh))

    def bytes_of(specs, rules):
        total = 0
        for spec in specs.values():
            where = rules.spec(spec.axes or (None,) * len(spec.shape), mesh, spec.shape)
            total += 4 * math.prod(jax.sharding.NamedSharding(mesh, where).shard_shape(tuple(spec.shape)))
        return total

    mine = step_arguments(small, given)
    assert sum(b.bytes for b in mine if b.kind == "parameters") == bytes_of(
        model.compiled.params, given.rules
    )
    assert sum(b.bytes for b in mine if b.kind == "model state") == bytes_of(
        model.compiled.states, given.rules
    )
    moments = sum(b.bytes for b in mine if b.kind == "optimizer" and b.shape)
    assert moments == 2 * bytes_of(model.compiled.params, given.optimizer_rules)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), _tree(model.compiled.params))
    state = jax.eval_shape(build_optimizer(small, param_axes=model.param_axes).init, shapes)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    alone = step_arguments(small, layout(1, 1))
    assert sum(b.bytes for b in alone if b.kind == "optimizer") == whole


def _tree(flat):
    tree = {}
    for path, leaf in flat.items():
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = leaf
    return tree


def test_a_dimension_that_does_not_divide_is_whole():
    rules = layout().rules
    assert part_of((512, 96), ("vocab", "embed"), (("data", 4), ("model", 4)), rules) == (128, 24)
    assert part_of((510, 95), ("vocab", "embed"), (("data", 4), ("model", 4)), rules) == (510, 95)
    assert part_of((64, 2049), ("batch", None), (("data", 4),), rules, "activations") == (16, 2049)


# ---- the whole -----------------------------------------------------------------------------------------------------


def test_the_kinds_add_up_and_travel():
    found = estimate_memory(config(), layout(), V4)
    assert sum(found.kinds.values()) == found.total
    assert found.total - found.arguments == found.gradients + found.activations + (found.temporaries or 0)
    assert json.loads(json.dumps(found.to_json()))["total"] == found.total
    assert "GiB a device" in str(found)


def test_more_rematerialisation_keeps_less():
    kept = [estimate_memory(config(), layout(remat=r), V4).activations for r in ("none", "dots", "full")]
    assert kept[0] > kept[1] > kept[2] > 0


def test_microbatches_keep_less_and_sum_gradients():
    one = estimate_memory(config(), layout(microbatches=1), V4)
    four = estimate_memory(config(), layout(microbatches=4), V4)
    assert four.activations * 4 == one.activations
    assert four.gradients > one.gradients


def test_kept_values_are_counted_by_hand():
    # 24 blocks × 16 rows × 2048 tokens × 2048 wide × 2 bytes.
    assert estimate_memory(config(), layout(), V4).activations == 24 * 16 * 2048 * 2048 * 2


def test_sharding_divides_parameters_and_moments():
    shared = estimate_memory(config(), layout(16, 1), V4)
    whole = estimate_memory(config(), layout(16, 1, parameters="replicated"), V4)
    zero = estimate_memory(config(), layout(16, 1, parameters="replicated", optimizer="sharded"), V4)
    assert whole.parameters == 16 * shared.parameters
    assert zero.parameters == whole.parameters
    assert zero.optimizer == shared.optimizer


def test_moments_in_the_hosts_memory_are_not_here():
    here = estimate_memory(config(), layout(), V4)
    there = estimate_memory(config(), layout(offload="optimizer"), V4)
    assert there.optimizer < 100 < here.optimizer


def test_bfloat16_parameters_need_no_copies():
    single = config()
    half = single.replace(precision=single.precision.replace(param_dtype="bfloat16"))
    a, b = (estimate_memory(c, layout(microbatches=4), V4) for c in (single, half))
    assert b.parameters * 2 == a.parameters
    assert (b.temporaries or 0) < (a.temporaries or 0)
    # Sums over microbatches stay float32; what is stacked of one is halved.
    assert a.gradients / 2 < b.gradients < a.gradients


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (layout(4, 2), "8 devices"),
        (layout(microbatches=7), "7 microbatches"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(given, said):
    with pytest.raises(PlanError, match=said) as caught:
        estimate_memory(config(), given, V4)
    assert isinstance(caught.value, CapibaraError)


def test_later_estimates_of_a_model_are_arithmetic(monkeypatch):
    estimate_memory(config(), layout(), V4)

    def refuse(*_, **__):
        raise AssertionError("the model was built again")

    monkeypatch.setattr("capibara.core.decoder.build_decoder", refuse)
    begin = time.process_time()
    for count in (1, 2, 4, 8):
        estimate_memory(config(), layout(microbatches=count), V4)
    assert time.process_time() - begin < 5  # a thousand times what it takes: only a trace would be as slow


def test_no_device_is_asked_for(tmp_path):
    import subprocess
    import sys

    code = (
        "import jax\n"
        "from capibara.plan import parse_slice\n"
        "from capibara.sharding import Layout\n"
        "from capibara.plan.memory import estimate_memory\n"
        "from capibara.config import ModularModelConfig\n"
        "c = ModularModelConfig.from_toml('demo')\n"
        "estimate_memory(c, Layout(mesh=(('data', 4), ('model', 1))), parse_slice('v4:2x2x1'))\n"
        "from jax.extend import backend\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# ---- any step --------------------------------------------------------------------------------------------------------


def test_of_any_step_the_arguments_are_known_and_the_rest_is_not():
    jax = pytest.importorskip("jax")
    spec = jax.sharding.PartitionSpec
    trees = {
        "parameters": {
            "w": jax.ShapeDtypeStruct((1024, 512), "float32"),
            "b": jax.ShapeDtypeStruct((96,), "float32"),
        },
        "batch": jax.ShapeDtypeStruct((64, 128), "int32"),
    }
    specs = {"parameters": {"w": spec("data", "model"), "b": spec()}, "batch": spec(("data", "model"))}
    found = estimate_memory_of(trees, {"data": 4, "model": 2}, specs=specs)
    assert found.parameters == 256 * 256 * 4 + 96 * 4
    assert found.inputs == 8 * 128 * 4
    assert found.padding == 512 - 96 * 4
    assert found.temporaries is None
    assert found.to_json()["temporaries_known"] is False
    assert "only the compiler knows" in str(found)
    assert found.fits(V4) is None
    whole = estimate_memory_of(trees)
    assert whole.parameters == 1024 * 512 * 4 + 96 * 4


def test_described_arrays_with_a_sharding_are_counted_by_it():
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = estimate_memory_of({"state": (jax.ShapeDtypeStruct((8, 128), "float32", sharding=where), key)})
    assert found.inputs == 2 * 128 * 4 + 8


def test_wrong_specs_are_refused():
    jax = pytest.importorskip("jax")
    array = {"parameters": jax.ShapeDtypeStruct((10, 8), "float32")}
    spec = jax.sharding.PartitionSpec
    with pytest.raises(PlanError, match="axis 'tensor'"):
        estimate_memory_of(array, {"data": 4}, specs={"parameters": spec("tensor")})
    with pytest.raises(PlanError, match="does not divide"):
        estimate_memory_of(array, {"data": 4}, specs={"parameters": spec("data")})


def test_too_much_does_not_fit():
    known = estimate_memory(config(), layout(), V4)
    assert known.fits(V4) is True
    assert MemoryEstimate(2**40, 0, 0, 0, 0, 0, 0).fits(V4) is False


# Of Mamba-2, in bfloat16 with float32 parameters: embed_dim, blocks, slice, mesh, sequences of 2,048, and the bytes
# that the compiler has (libtpu 0.0.42).
MAMBA2 = [
    (768, 24, "v5e:2x2", {"data": 4, "model": 1}, 16, 448_711_680 + 1_287_995_904),
    (2560, 64, "v5e:4x4", {"data": 8, "model": 2}, 32, 2_333_767_680 + 5_487_411_712),
    (2560, 64, "v5e:4x4", {"data": 16, "model": 1}, 32, 2_823_067_648 + 4_480_205_312),
]


@pytest.mark.parametrize(("width", "blocks", "where", "mesh", "rows", "total"), MAMBA2)
def test_state_space_blocks_without_feed_forward_layers(
    width: int, blocks: int, where: str, mesh: dict[str, int], rows: int, total: int
) -> None:
    model = {
        "vocab_size": 50_288,
        "embed_dim": width,
        "num_layers": blocks,
        "pattern": ["ssm"],
        "mlp": "none",
        "positions": "none",
        "residual": "accumulate",
        "max_sequence_length": 2048,
        "ssm": {"state_dim": 128, "head_dim": 64},
    }
    config = ModularModelConfig.from_dict(
        {
            "model": model,
            "precision": {"compute_dtype": "bfloat16"},
            "train": {"batch_size": rows, "sequence_length": 2048},
        }
    )
    found = estimate_memory(config, Layout(mesh=tuple(mesh.items()), remat="full"), parse_slice(where))
    assert found.total == pytest.approx(total, rel=0.06)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "sgd"])
def test_every_optimizer_is_estimated(name: str) -> None:
    config = ModularModelConfig.from_toml("demo", [f"optimizer.name={name}"])
    found = estimate_memory(config, Layout(mesh=(("data", 1),)), parse_slice("v5e:1x1"))
    assert found.optimizer > 0


def test_what_is_on_its_way_is_counted_where_the_compiler_may_fuse_it():
    """An option that is switched off is like one that is not given."""
    target = parse_slice("v6e:4x4")
    options = whole_products("v6e")
    model = config()  # without chunks of logits
    model = model.replace(train=model.train.replace(batch_size=16, sequence_length=1024))
    fused = {name for name in options if name.startswith(FUSED)}
    totals = [
        estimate_memory(model, layout(data=16, model=1, flags=tuple(sorted(flags.items()))), target).total
        for flags in (
            options,
            {name: "false" if name in fused else value for name, value in options.items()},
            {name: value for name, value in options.items() if name not in fused},
        )
    ]
    assert fused
    assert totals[0] > totals[1] == totals[2]
