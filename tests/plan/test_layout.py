"""Layouts: checked, written and read back, and the rules that they stand for."""

from __future__ import annotations

import json
import shlex
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.config import ModularModelConfig, SettingsError
from capibara.errors import ConfigError
from capibara.plan import parse_slice
from capibara.plan.search.space import layouts, meshes
from capibara.sharding import Layout


class Sizes:
    def __init__(self, **shape: int) -> None:
        self.shape = shape


def test_the_rules_of_parameters_and_moments():
    mesh: Any = Sizes(data=4, model=2)
    whole = Layout(mesh=(("data", 4), ("model", 2)), parameters="replicated")
    moments = Layout(mesh=whole.mesh, parameters="replicated", optimizer="sharded")
    sharded = Layout(mesh=whole.mesh)
    from jax.sharding import PartitionSpec as P

    names, shape = ("embed", "mlp"), (64, 64)
    assert sharded.rules.spec(names, mesh, shape) == P("data", "model")
    assert whole.rules.spec(names, mesh, shape) == P(None, "model")
    assert whole.optimizer_rules.spec(names, mesh, shape) == P(None, "model")
    assert moments.rules.spec(names, mesh, shape) == P(None, "model")
    assert moments.optimizer_rules.spec(names, mesh, shape) == P("data", "model")
    # Activations are cut alike.
    assert whole.rules.spec(("batch",), mesh, (8,), kind="activations") == P(
        "data",
    )


LAYOUTS = st.builds(
    Layout,
    mesh=st.sampled_from([(("data", 4), ("model", 2)), (("data", 1), ("model", 1)), (("x", 3),)]),
    parameters=st.sampled_from(["sharded", "replicated"]),
    optimizer=st.sampled_from(["as parameters", "sharded"]),
    remat=st.sampled_from(["none", "dots", "full"]),
    microbatches=st.integers(1, 1000),
    offload=st.sampled_from(["none", "optimizer"]),
    flags=st.sampled_from(
        [(), (("xla_enable_async_all_gather", "true"),), (("xla_a", "1,2"), ("xla_b", "-3.5"))]
    ),
)


@given(LAYOUTS)
def test_json_and_back(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remat": "some"}, "remat='some' must be one of none, dots, full"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"mesh": ()}, "mesh="),
        ({"mesh": (("data", 2), ("data", 2))}, "each of its axes once"),
        ({"mesh": (("data", 0),)}, "integer from 1"),
        ({"parameters": "shard"}, "Did you mean 'sharded'"),
    ],
)
def test_bad_layouts(change, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Layout(**{"mesh": (("data", 2),), **change})


@pytest.mark.parametrize(
    "data", [{}, {"mesh": 3}, {"mesh": [["data", 2]], "speed": 1}, {"mesh": [["data"]]}, []]
)
def test_what_is_no_layout(data):
    with pytest.raises(ConfigError, match="layout"):
        Layout.from_json(data)


@given(LAYOUTS)
def test_settings_and_back(layout):
    # Through a shell too: some values have spaces, brackets and quotes.
    words = shlex.split(shlex.join(layout.overrides()))
    config = ModularModelConfig.from_toml("demo", ["train.batch_size=1000", "model.num_layers=1"])
    for overrides in (words, layout.settings()):
        # How the batch divides is another rule's matter.
        rows = {"train.batch_size": layout.microbatches}
        assert Layout.from_config(config.with_overrides(rows).with_overrides(overrides)) == layout


def test_every_layout_of_a_search_is_settings():
    config = ModularModelConfig.from_toml("production/tpu_v4")
    found = list(layouts(config, parse_slice("v4-32")))
    for layout in [*found[::17], *(layout for layout in found if layout.offload != "none")]:
        changed = config.with_overrides(layout.overrides())
        assert Layout.from_config(changed) == layout
        assert changed.tpu.enabled
        # And through a file.
        assert ModularModelConfig.from_dict(tomllib.loads(changed.to_toml())) == changed
    assert len({layout.flags for layout in found}) > 1


@pytest.mark.parametrize(
    "flag",
    [
        "",
        "xla_enable_async_all_gather",
        "xla_enable_async_all_gather=",
        "--xla_enable_async_all_gather=true",
        "xla_dump_to=here",
        "xla_hlo_profile=true",
        "xla_tpu_x=a b",
        "xla_tpu_x=a;b",
        "libtpu_x=1",
        "xla_tpu_x=/etc/passwd",
        "xla_tpu_x=1\n",
    ],
)
def test_flags_that_are_none(flag):
    with pytest.raises(SettingsError, match="flags"):
        ModularModelConfig.from_toml("demo", {"tpu.flags": [flag]})
    with pytest.raises(SettingsError, match=r"tpu\.flags.*each option once"):
        ModularModelConfig.from_toml("demo", {"tpu.flags": ["xla_a=1", "xla_a=2"]})


def test_the_space_of_a_small_slice():
    config = ModularModelConfig.from_toml("demo", ["train.batch_size=8", "model.num_heads=6"])
    found = list(layouts(config, parse_slice("v4:2x2x1")))
    assert len(found) == len(set(found))
    assert {layout.mesh for layout in found} == {
        *((("data", 4), ("model", 1)), (("data", 2), ("model", 2))),
        *((("pipeline", 2), ("data", d), ("model", 2 // d)) for d in (1, 2)),
    }
    for layout in found:
        assert layout.num_devices == 4
        assert 8 % (layout.microbatches * layout.axis_sizes["data"]) == 0
    assert {layout.remat for layout in found} == {"none", "dots", "full"}
    assert {layout.offload for layout in found} == {"none", "optimizer"}


def test_meshes_divide_the_heads():
    assert [dict(m)["model"] for m in meshes(16, 8)] == [1, 2, 4, 8]
    assert [dict(m)["model"] for m in meshes(12, 6)] == [1, 2, 3, 6]
