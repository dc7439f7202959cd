"""Labels of layouts: no two different ones print the same, in tables, figures and lines of progress."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.config import ModularModelConfig
from capibara.plan import parse_slice, plan
from capibara.plan.report.labels import ProgressLabels, differences, mesh_word, sharding_word
from capibara.plan.search.space import layouts
from capibara.sharding import Layout

PAIRS = st.tuples(st.sampled_from(["xla_a", "a", "xla_tpu_b", "b"]), st.sampled_from(["1", "2", "1 b=2"]))
LAYOUTS = st.builds(
    Layout,
    mesh=st.sampled_from(
        [(("data", 4),), (("data", 4), ("model", 1)), (("data", 2), ("model", 2)), (("x", 4),)]
    ),
    parameters=st.sampled_from(["sharded", "replicated"]),
    optimizer=st.sampled_from(["as parameters", "sharded"]),
    remat=st.sampled_from(["none", "dots", "full"]),
    microbatches=st.integers(1, 3),
    offload=st.sampled_from(["none", "optimizer"]),
    flags=st.lists(PAIRS, max_size=3).map(tuple),
)


def columns(layout: Layout) -> tuple[object, ...]:
    return mesh_word(layout), sharding_word(layout), layout.remat, layout.microbatches


@given(st.lists(LAYOUTS, max_size=8, unique=True))
def test_no_two_rows_have_the_same_label(found):
    texts = differences(found) if found else []
    rows = {(*columns(layout), text) for layout, text in zip(found, texts, strict=True)}
    assert len(rows) == len(found)


@given(st.lists(LAYOUTS, max_size=12))
def test_no_two_lines_of_progress_have_the_same_label(found):
    labels = ProgressLabels()
    said = {layout: labels.of(layout) for layout in found}
    assert len(set(said.values())) == len(set(found))
    # And each keeps its own.
    assert said == {layout: labels.of(layout) for layout in found}


def test_a_line_of_progress_says_which_flags():
    labels = ProgressLabels()
    one, two, three = (
        Layout(mesh=(("data", 4),), flags=flags)
        for flags in ((("xla_a", "1"), ("xla_b", "2")), (("xla_a", "1"),), (("xla_c", "3"), ("xla_b", "2")))
    )
    text = "data 4, parameters sharded, remat full"
    assert [labels.of(each) for each in (one, two, three, one)] == [
        text,
        f"{text}, without b=2",
        f"{text}, with c=3, without a=1",
        text,
    ]
    assert labels.of("train.batch_size=8") == "train.batch_size=8"


def test_columns_are_not_repeated_where_they_suffice():
    found = [Layout(mesh=(("data", 4),), remat=remat, flags=((remat, "1"),)) for remat in ("none", "full")]
    assert differences(found) == ["", ""]
    sharded = Layout(mesh=(("data", 4),), optimizer="sharded")
    assert sharding_word(sharded) == "sharded, optimizer too"


@pytest.mark.thin(4)
@pytest.mark.parametrize("topology", ["v4-32", "v5p:2x2x1"])
@pytest.mark.parametrize("settings", [[], ["model.experts.count=8", "model.experts.per_token=2"]])
def test_rows_of_whole_plans_differ(topology, settings):
    """Every layout of a search, as the table prints it."""
    config = ModularModelConfig.from_toml("production/tpu_v4", settings)
    found = plan(config, topology, compile=False, top=10_000)
    every = list(layouts(config, parse_slice(topology)))
    assert len(set(every)) == len(every)
    shown = [candidate.layout for candidate in found.candidates]
    rows = {(*columns(layout), text) for layout, text in zip(shown, differences(shown), strict=True)}
    assert len(rows) == len(shown) > 50
    lines = str(plan(config, topology, compile=False, top=40)).splitlines()[3:43]
    assert not any("…" in line for line in lines)
    # However alike their figures are.
    assert len({re.sub(r"\d+\.\d+|[\d,]{4,}|%|–|^ *\d+", "", line) for line in lines}) == 40
