"""Where a step's predicted time and memory go: sums, lines, parts and passes of programs whose parts are known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpu_compiler import needs_libtpu

from capibara.plan import attribution as module
from capibara.plan import parse_slice, plan
from capibara.plan.attribution import Attribution, attribute
from capibara.plan.compiler import CompiledProgram, Memory
from capibara.plan.errors import PlanError
from capibara.plan.program import Frame, Frames, read_places, read_program
from capibara.plan.program.parts import generated_part, part_of, pass_of
from capibara.plan.report.where import where_line, where_tables
from capibara.plan.time import predict_step, time_of_each

ONE = parse_slice("v5e:1x1")
MESH = (("data", 1), ("model", 1))


BUFFER = {"bytes": 8, "padding": 0, "shape": "f32[2]", "op_name": "x", "kind": "temporary", "place": "blocks"}


def program_of(text: str, folder: Path, **about) -> CompiledProgram:
    path = folder / "program.hlo.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return CompiledProgram(status="ok", text_path=path, coordinates=((0, 0),), **about)


def trained(w, x):
    def loss(w):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w[0])
        with jax.named_scope("second"):
            y = jax.checkpoint(lambda h: jnp.sin(h @ w[1]) @ w[2])(h)
        return (y**2).sum()

    return [one - 0.1 * gradient for one, gradient in zip(w, jax.grad(loss)(w), strict=True)]


@pytest.fixture(scope="module")
def step_text() -> str:
    x = jnp.ones((64, 256))
    text = jax.jit(trained).lower([jnp.ones((256, 256))] * 3, x).compile().as_text()
    assert text is not None
    return text


def test_all_of_the_time_is_somewhere(step_text: str, tmp_path: Path):
    found = attribute(program_of(step_text, tmp_path), ONE, MESH)
    predicted = predict_step(read_program(step_text), ONE, MESH)
    assert found.seconds == pytest.approx(predicted.seconds)
    for some in (found.parts, found.lines, found.passes):
        assert sum(one.seconds for one in some) == pytest.approx(predicted.seconds)
        assert all(one.seconds >= 0 for one in some)
    assert sum(one.compute for one in found.parts) == pytest.approx(predicted.compute)
    assert sum(one.other for one in found.lines) == pytest.approx(predicted.memory)


def test_parts_lines_and_passes_are_those_of_the_source(step_text: str, tmp_path: Path):
    lines = {
        f"{__file__}:{number}": text for number, text in enumerate(Path(__file__).read_text().split("\n"), 1)
    }
    found = attribute(program_of(step_text, tmp_path, lines=lines), ONE, MESH)
    spent = {one.name: one for one in found.parts}
    # The first has its product and the gradient of its weights; the second two products and twice two gradients, and
    # once more the first of its products where the compiler leaves what is computed again.
    assert spent["second"].compute / spent["first"].compute in (pytest.approx(3), pytest.approx(3.5))
    assert spent["first"].compute > 0
    texts = [one.text.strip() for one in found.lines if one.compute]
    assert "h = jnp.tanh(x @ w[0])" in texts
    assert any("jnp.sin(h @ w[1]) @ w[2]" in text for text in texts)
    passes = {one.name: one.compute for one in found.passes}
    assert passes["backward"] + passes.get("recomputed", 0) > passes["forward"] > 0


def test_it_travels_and_prints(step_text: str, tmp_path: Path):
    found = attribute(program_of(step_text, tmp_path), ONE, MESH)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["seconds"] == found.seconds
    assert data["parts"][0]["seconds"] == found.parts[0].seconds
    (line,) = where_line(found)
    assert "backward" in line
    assert found.parts[0].name in line
    tables = "\n".join(where_tables(found))
    assert f"{found.parts[0].seconds / found.seconds:.1%}" in tables
    assert where_line(None) == []
    assert where_line(Attribution(0.0, (), (), ())) == []


def test_what_is_left_of_many_lines_is_one(step_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MOST_LINES", 3)
    found = attribute(program_of(step_text, tmp_path), ONE, MESH)
    assert len(found.lines) == 4
    assert found.lines[3].name.endswith("more lines)")
    assert sum(one.seconds for one in found.lines) == pytest.approx(found.seconds)


def test_a_step_that_takes_no_time_has_no_tables():
    assert where_tables(Attribution(0.0, (), (), ())) == []


@pytest.mark.parametrize(
    "buffers", [[1], [{"bytes": 1}], [{**BUFFER, "place": ["a"]}], [{**BUFFER, "bytes": 1.5}]]
)
def test_damaged_buffers_of_a_cached_program(buffers):
    data = CompiledProgram(
        status="ok", memory=Memory(arguments=1, outputs=0, aliased=0, temporaries=0)
    ).to_json()
    assert CompiledProgram.from_json({**data, "buffers": [BUFFER]}).buffers == (BUFFER,)
    with pytest.raises(PlanError, match="not a result of a compilation"):
        CompiledProgram.from_json({**data, "buffers": buffers})


def test_memory_by_part_and_kind(step_text: str, tmp_path: Path):
    some = {"shape": "f32[8]", "padding": 0}
    buffers = (
        {**some, "bytes": 30, "op_name": "x", "kind": "temporary", "place": "blocks/mlp"},
        {**some, "bytes": 20, "op_name": "x", "kind": "temporary", "place": "blocks/mlp"},
        {**some, "bytes": 40, "op_name": "x", "kind": "parameters", "place": "blocks/mlp"},
        {**some, "bytes": 10, "op_name": "jit(step)/jvp()/second/dot", "kind": "temporary", "place": ""},
        {**some, "bytes": 5, "op_name": "", "kind": "output", "place": ""},
    )
    found = attribute(program_of(step_text, tmp_path, buffers=buffers), ONE, MESH).memory
    assert [(one.name, one.kind, one.bytes) for one in found] == [
        ("blocks/mlp", "temporary", 50),
        ("blocks/mlp", "parameters", 40),
        ("second/dot", "temporary", 10),
        ("f32[8]", "output", 5),
    ]


def test_a_program_that_did_not_compile():
    with pytest.raises(PlanError, match="did not compile"):
        attribute(CompiledProgram(status="oom"), ONE, MESH)


def test_time_of_each_is_the_whole():
    """Also of a program with loops, exchanges and copies, made by the compiler for v4."""
    text = (Path(__file__).parent / "hlo" / "v4_async_gather.txt").read_text()
    facts, places = read_places(text)
    assert facts == read_program(text)
    assert len(places.pieces) == len(facts.pieces)
    assert len(places.kernels) == len(facts.kernels)
    assert len(places.collectives) == len(facts.collectives)
    target = parse_slice(
        f"v4:{'2x2x1' if facts.num_devices == 4 else '2x2x2' if facts.num_devices == 8 else '2x2x4'}"
    )
    mesh = (("data", facts.num_devices), ("model", 1))
    each = time_of_each(facts, target, mesh)
    assert sum(each.values()) == pytest.approx(predict_step(facts, target, mesh).seconds)


FILES = Frames.of(
    """HloModule m

FileNames
1 "/usr/lib/python3.11/site-packages/flax/dense.py"
2 "model.py"
3 "<capibara.compose Model 1>"

FunctionNames
1 "Dense.__call__"
2 "Net.attend"
3 "blocks_block"
4 "forward"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=3 end_column=9}
2 {file_name_id=2 function_name_id=2 line=31 end_line=31 column=3 end_column=9}
3 {file_name_id=3 function_name_id=3 line=12 end_line=12 column=3 end_column=9}
4 {file_name_id=3 function_name_id=4 line=20 end_line=20 column=3 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}
4 {file_location_id=1 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=1}

%f (p: f32[2]) -> f32[2] {
"""
)
GENERATED = {12: "    blocks_mlp_silu = ops.silu(x)", 20: "    blocks, state = ops.repeat(blocks_block)"}


def generated(file: str, line: int) -> str:
    return GENERATED.get(line, "")


def test_frames_of_a_program():
    assert list(FILES.stack("2")) == [
        Frame("/usr/lib/python3.11/site-packages/flax/dense.py", "Dense.__call__", 7),
        Frame("model.py", "Net.attend", 31),
    ]
    assert FILES.source("1") == "model.py:31"
    assert FILES.source("a.py:4") == "a.py:4"
    assert FILES.source("99") == FILES.source("") == ""
    assert len(FILES.places()) == 4
    assert Frames.of("HloModule m\n\nENTRY %main () -> f32[] {\n").places() == set()


@given(st.text(alphabet="FileNamesStackLocation 0123456789={}_id\n", max_size=300))
def test_any_tables_are_read(text: str):
    """Also frames that call one another in a circle."""
    found = Frames.of(f"HloModule m\n\nStackFrames\n{text}")
    for number in range(12):
        assert len(list(found.stack(str(number)))) <= 200


def test_numbers_that_are_not_numbers():
    assert list(Frames.of("StackFrames\n² {file_location_id=1}\n").stack("²")) == []


def test_frames_in_a_circle_end():
    text = "StackFrames\n1 {file_location_id=1 parent_frame_id=3}\n2 {file_location_id=1 parent_frame_id=2}\n"
    assert len(list(Frames.of(text).stack("1"))) == 200


def test_parts_of_a_model():
    path = "jit(step)/jvp()/while/body/closed_call/dot_general"
    assert part_of(path, FILES.stack("4"), generated) == "blocks/mlp_silu"
    assert part_of(path, FILES.stack("5"), generated) == "blocks"
    assert (
        part_of("jit(step)/transpose(jvp(Net))/Dense_0/dot_general", FILES.stack("2"), generated)
        == "Net/Dense_0"
    )
    assert (
        part_of("jit(step)/capibara:cross_entropy:xla/while/body/exp", FILES.stack("2"), generated)
        == "cross_entropy"
    )
    assert part_of("jit(step)/jvp(jit(_take))/gather", FILES.stack("1"), generated) == "attend"
    again = "jit(step)/transpose(jvp(a))/jvp(a)/checkpoint/transpose"
    assert part_of(again, [], generated) == "a"
    assert part_of("jit(f)/vmap(jvp(a))/b/while/body/sin", [], generated) == "a/b"
    # Not the library's function, but the one that calls it.
    assert part_of(path, FILES.stack("2"), generated) == "attend"
    assert part_of(path, [], generated) == ""
    assert generated_part(Frame("<capibara.compose Model 1>", "forward", 1), lambda *_: "return {…}") == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("jit(step)/jvp()/while/body/dot_general", "forward"),
        ("jit(step)/transpose(jvp())/while/body/dot_general", "backward"),
        ("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/dot_general", "recomputed"),
        ("jit(step)/mul", "update"),
        ("convert.14", "unknown"),
        ("", "unknown"),
    ],
)
def test_passes(path: str, expected: str):
    assert pass_of(path) == expected


@pytest.mark.slow
@needs_libtpu
def test_a_plan_says_where_its_time_goes(tmp_path: Path):
    """Compiled for a TPU: the lines of a model's generated code are its parts."""
    from capibara.config import ModularModelConfig

    config = ModularModelConfig.from_toml(
        "demo", ["model.num_layers=2", "train.batch_size=8", "train.sequence_length=128"]
    )
    found = plan(config, "v5e:2x2", max_compiles=1, cache=tmp_path)
    where = found.where
    assert where is not None
    assert where.seconds == pytest.approx(found.step_seconds)
    parts = {one.name for one in where.parts}
    assert any(name.startswith("blocks/") for name in parts), parts
    assert any("attention" in name for name in parts), parts
    assert any("language.py" in one.name and one.text for one in where.lines)
    assert {"forward", "backward", "update"} <= {one.name for one in where.passes}
    assert any(one.kind == "parameters" and one.name.endswith("weight") for one in where.memory)
    assert "where   " in str(found)
    assert json.loads(json.dumps(found.to_json()))["where"]["parts"]
    # A line above a kernel changes the places, and not the program.
    again = plan(config, "v5e:2x2", max_compiles=1, cache=tmp_path)
    assert again.where == where
    assert again.best.program_hash == found.best.program_hash
    found.report(tmp_path / "plan.html")
    assert where.parts[0].name in (tmp_path / "plan.html").read_text()
    found.report(tmp_path / "plan.png")
