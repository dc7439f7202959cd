"""Plans as tables, pages, pictures and lockfiles, from figures that stand here."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from capibara.config import ModularModelConfig
from capibara.hardware import get_price
from capibara.plan import Candidate, Plan, PlanError, parse_slice, plan
from capibara.plan.lock import Drift, LockCheck, check_lock, write_lock
from capibara.plan.report.picture import figure_of, link_axes
from capibara.plan.report.table import digits, plan_text
from capibara.plan.sizes import size_text
from capibara.plan.time import Part, StepTime
from capibara.sharding import Layout

GIB = 2**30


def candidate(
    topology: str = "v4:2x2x1", mesh=(("data", 2), ("model", 2)), coordinates=(), **changes
) -> Candidate:
    time = StepTime(
        seconds=2.0,
        low=1.5,
        high=3.0,
        compute=1.2,
        memory=0.3,
        communication=0.5,
        hidden=0.25,
        parts=(Part("products", 1.2, "compiler cycles"), Part("gathers <of> parameters", 0.5, "links")),
        unknown=("copies to the host",),
    )
    given = {
        "layout": Layout(mesh=mesh),
        "target": parse_slice(topology),
        "memory": {"parameters": 2 * GIB, "optimizer": 4 * GIB, "temporaries": GIB},
        "memory_source": "compiler",
        "time": time,
        "tokens": 1_000_000,
        "flops": 0.5 * 2.0 * 4 * 275e12,
        "price": get_price("tpu-v4"),
        "program_hash": "abc",
        "versions": {"jax": "0"},
        "coordinates": coordinates,
    }
    return Candidate(**{**given, **changes})


def made(*candidates: Candidate, **changes) -> Plan:
    first = candidates[0]
    return Plan(
        **{
            "work": "a model",
            "target": first.target,
            "limit_bytes": first.target.usable_hbm_bytes,
            "candidates": candidates,
            "considered": 20,
            "promising": 10,
            "compiled": 2,
            "config": ModularModelConfig.from_toml("demo"),
            **changes,
        }
    )


def test_figures_of_a_candidate():
    found = candidate()
    assert found.hbm_bytes == 7 * GIB
    assert found.fits
    assert found.tokens_per_second == 500_000
    assert found.mfu == pytest.approx(0.5)
    price = get_price("tpu-v4").usd_per_chip_hour
    assert found.usd_per_step == pytest.approx(4 * price * 2 / 3600)
    assert found.usd_per_billion_tokens == pytest.approx(4 * price * 2 / 3600 * 1000)
    without = candidate(price=None, tokens=None, flops=None)
    assert (
        without.usd_per_step
        is without.usd_per_billion_tokens
        is without.mfu
        is without.tokens_per_second
        is None
    )
    assert not candidate(memory={"parameters": 40 * GIB}).fits


def test_the_table_says_what_it_knows():
    text = plan_text(made(candidate(), notes=("nothing is certain",)))
    for words in (
        "a model",
        "v4:2x2x1",
        "data 2 × model 2",
        "7.00",
        "1.5–3",
        "500,000",
        "50.0%",
        "parameters 2.00",
    ):
        assert words in text
    assert "compute 60%, memory 15%, communication 25%" in text
    assert "note: nothing is certain" in text
    assert "20 layouts, 10 may fit, 2 compiled" in text
    assert str(made(candidate())) == plan_text(made(candidate()))
    # Without prices and tokens columns are empty, not wrong.
    assert "nan" not in plan_text(made(candidate(price=None, tokens=None, flops=None)))


def test_rows_that_differ_in_flags_alone_say_which():
    """Also where another setting tells one of them apart, and never where none is needed."""
    mesh = (("data", 2), ("model", 2))
    fast, slow = ("xla_enable_async_all_gather", "true"), ("xla_tpu_other", "7")
    layouts = [
        Layout(mesh=mesh, flags=(fast, slow)),
        Layout(mesh=mesh, flags=(fast,)),
        Layout(mesh=mesh, flags=(fast,), remat="none"),
    ]
    text = plan_text(made(*(candidate(layout=layout) for layout in layouts)), 200)
    rows = [line for line in text.splitlines() if line[:2] in ("1 ", "2 ", "3 ")]
    assert [row.split("  ")[-1].strip() for row in rows] == ["tpu_other=7", "no others", "no others"]
    assert len(set(rows)) == 3
    plain = plan_text(made(candidate(layout=layouts[0]), candidate(layout=layouts[2])), 200)
    assert "flags" not in plain.splitlines()[2]
    labels = [label.get_text() for label in figure_of(made(*map(_with, layouts))).axes[0].get_yticklabels()]
    assert len(set(labels)) == 3


def _with(layout: Layout) -> Candidate:
    return candidate(layout=layout)


@pytest.mark.parametrize("coordinates", [(), ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))])
def test_legends_cover_no_bar_and_no_axis(coordinates):
    figure = figure_of(made(*(candidate(coordinates=coordinates) for _ in range(5))))
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    legends = [axes.get_legend().get_window_extent(renderer) for axes in figure.axes if axes.get_legend()]
    assert len(legends) == len(figure.axes) == (3 if coordinates else 2)
    bars = [axes.get_window_extent(renderer) for axes in figure.axes[:2]]
    labels = [axes.xaxis.label.get_window_extent(renderer) for axes in figure.axes[:2]]
    for legend in legends:
        assert not any(legend.overlaps(other) for other in [*bars, *labels])
        assert figure.bbox.x0 <= legend.x0 <= legend.x1 <= figure.bbox.x1
    assert not any(a.overlaps(b) for a in legends for b in legends if a is not b)


def test_json_is_plain():
    data = json.loads(json.dumps(made(candidate()).to_json(), allow_nan=False))
    assert data["candidates"][0]["hbm_bytes"] == 7 * GIB
    assert data["candidates"][0]["layout"]["mesh"] == [["data", 2], ["model", 2]]
    assert data["candidates"][0]["time"]["parts"][0]["source"] == "compiler cycles"


SQUARE = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))


def test_links_belong_to_mesh_axes():
    found = link_axes(candidate(coordinates=SQUARE))
    assert found == {
        ((0, 0, 0), (1, 0, 0)): "data",
        ((0, 1, 0), (1, 1, 0)): "data",
        ((0, 0, 0), (0, 1, 0)): "model",
        ((1, 0, 0), (1, 1, 0)): "model",
    }
    line = link_axes(candidate(mesh=(("data", 4), ("model", 1)), coordinates=SQUARE))
    assert set(line.values()) == {"data"}


def test_links_round_the_back():
    places = tuple((x, y, z) for x in range(4) for y in range(4) for z in range(4))
    found = link_axes(candidate("v4:4x4x4", mesh=(("data", 16), ("model", 4)), coordinates=places))
    assert len(found) == 3 * 64
    assert found[(0, 0, 3), (0, 0, 0)] == "model"
    assert found[(3, 0, 0), (0, 0, 0)] == "data"
    # Twisted: a step along z is one along both mesh axes.
    twisted = tuple((x, y, (z + y) % 4) for x in range(4) for y in range(4) for z in range(4))
    assert (
        "several"
        in link_axes(candidate("v4:4x4x4", mesh=(("data", 16), ("model", 4)), coordinates=twisted)).values()
    )


def test_pages_and_pictures(tmp_path):
    found = made(
        candidate(coordinates=SQUARE), candidate(mesh=(("data", 4), ("model", 1)), coordinates=SQUARE)
    )
    page = found.report(tmp_path / "plan.html").read_text()
    assert "gathers &lt;of&gt; parameters" in page
    assert "copies to the host" in page
    assert "data:image/png;base64,iVBOR" in page
    picture = found.report(tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    with pytest.raises(PlanError, match=r"\.html or \.png"):
        found.report(tmp_path / "plan.pdf")
    with pytest.raises(PlanError, match="no candidate"):
        made(candidate(), candidates=()).report(tmp_path / "x.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.html", "plan.png"]


def test_drift_counts_only_upwards():
    assert Drift("HBM", 100, 102, 0.02).passed
    assert not Drift("HBM", 100, 103, 0.02).passed
    assert Drift("HBM", 100, 50, 0.02).passed
    assert "DRIFT" in str(Drift("step", 1.0, 2.0, 0.1))
    assert math.isclose(Drift("step", 1.0, 1.5, 0).change, 0.5)
    assert not LockCheck((), failure="gone").passed
    assert not LockCheck((Drift("HBM", 1, 2, 0.1),)).passed
    assert json.dumps(LockCheck((Drift("HBM", 1, 2, 0.1),), ("jax",)).to_json())


def test_only_compiled_plans_of_configurations_are_locked(tmp_path):
    path = tmp_path / "plan.lock"
    with pytest.raises(PlanError, match="estimate"):
        write_lock(made(candidate(memory_source="analytic")), path)
    with pytest.raises(PlanError, match="configuration"):
        write_lock(made(candidate(), config=None), path)
    assert not path.exists()
    made(candidate()).lock(path)
    assert json.loads(path.read_text())["hbm_bytes"] == 7 * GIB


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"config": {"model": {"wings": 2}}},
        {"topology": "v4:0x2x2"},
        {"layout": {"mesh": [["data", -1]]}},
        {"hbm_bytes": "many"},
        {"step_seconds": -1.0},
        {"step_seconds": True},
        {"versions": 3},
        {"figures": [1]},
        {"figures": {"FLOPs": "many"}},
        {"figures": {"FLOPs": 1.5}},
        {"view": "both"},
        {"layout": {"mesh": [["data", 4]], "flags": [["xla_dump_to", "x"]]}},
        {"layout": {"mesh": [["data", 4]], "flags": [["xla_mosaic_dump_to", "x"]]}},
        {"layout": {"mesh": [["data", 4]], "flags": [["xla_some", "/home"]]}},
        {"layout": {"mesh": [["data", 4]], "flags": [["some", "1"]]}},
        None,
    ],
)
def test_damaged_lockfiles_are_refused(tmp_path, change):
    path = tmp_path / "plan.lock"
    write_lock(made(candidate()), path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **change}) if change is not None else "[[" * 100_000)
    with pytest.raises(PlanError, match="not a valid plan lockfile"):
        check_lock(path)


def test_the_flags_of_plans_are_taken(tmp_path):
    from capibara.plan.lock import _read
    from capibara.plan.search.space import ASYNCHRONOUS, WHOLE_PRODUCTS

    path = tmp_path / "plan.lock"
    for flags in (ASYNCHRONOUS, WHOLE_PRODUCTS):
        write_lock(made(candidate()), path)
        data = json.loads(path.read_text())
        data["layout"]["flags"] = flags
        path.write_text(json.dumps(data))
        assert _read(path)["layout"].flags == flags
    del data["config"]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="missing 'config'"):
        check_lock(path)


def test_lockfiles_that_are_not_there_or_too_large(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        check_lock(tmp_path / "none")
    large = tmp_path / "large"
    with large.open("wb") as stream:
        stream.truncate(5 << 20)
    with pytest.raises(PlanError, match="larger than"):
        check_lock(large)
    for wrong in (-1, True, math.nan, "0.1"):
        with pytest.raises(PlanError, match="hbm_tolerance="):
            check_lock(large, hbm_tolerance=wrong)  # type: ignore[arg-type]


def test_settings_and_flags_can_be_copied():
    """However narrow the page: a line that is broken in two is not a command."""
    best = candidate()
    text = plan_text(made(best), 60)
    assert shlex.join(best.layout.overrides()) in text
    text = plan_text(made(best, config_name="demo"), 60)
    line = next(line for line in text.splitlines() if "capibara train" in line)
    _, _, command = line.partition(" run ")
    words = shlex.split(command)
    assert words[:4] == ["capibara", "train", "--config", "demo"]
    assert Layout.from_config(ModularModelConfig.from_toml("demo", words[4:])) == best.layout


def test_what_of_the_compilers_memory_is_estimated_is_said():
    compiled = candidate(memory={"activations": GIB, "temporaries": GIB})
    assert "[the TPU compiler; activations and temporaries separated by an estimate]" in plan_text(
        made(compiled)
    )
    assert "[the TPU compiler]" in plan_text(made(candidate(memory={"parameters": GIB, "temporaries": GIB})))
    rough = candidate(memory={"activations": GIB}, memory_source="analytic")
    assert "[an estimate]" in plan_text(made(rough))


# ---- sizes in words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (512, "512 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1.50 KiB"),
        (90 * 2**10, "90.00 KiB"),
        (512 * 2**10, "0.50 MiB"),
        (90 * 2**20, "90.00 MiB"),
        (2**29, "0.50 GiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (512 * 2**30, "512.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_sizes_have_a_unit_that_fits(size, text):
    assert size_text(size) == text


def test_a_small_plan_has_no_figures_of_zero_and_shows_the_limit_it_keeps():
    settings = (
        *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
        *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
    )
    config = ModularModelConfig.from_toml("demo", list(settings))
    text = str(plan(config, "v5e:2x2", compile=False, memory_limit_gb=0.5))
    assert "a device may use 0.50 GiB of its 15.75 GiB" in text
    assert "HBM MiB" in text
    assert "0.00" not in text
    assert "$/B tok" in text
    assert "step µs" in text
    assert "K parameters" in text
    (memory,) = [line for line in text.splitlines() if line.startswith("best")]
    assert " of 0.50 GiB [an estimate]" in memory
    assert "KiB" in memory
    assert "a device has 15.75 GiB" in str(plan(config, "v5e:2x2", compile=False))


@pytest.mark.parametrize(
    ("value", "text"), [(999.4, "999"), (999.5, "1,000"), (999.9, "1,000"), (1000, "1,000"), (12.345, "12.3")]
)
def test_three_digits_have_no_exponent(value, text):
    assert digits(value) == text
