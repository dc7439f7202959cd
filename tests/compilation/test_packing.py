"""Packed programs: made in one process, run in another without a compilation; refused where anything differs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compilation import (
    PackedProgramError,
    TpuCompilationConfig,
    count_compilations,
    create_tpu_optimized_jit,
    load_program,
    pack_program,
    read_packed,
)
from capibara.compilation.packing.environment import differences

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from capibara.compilation import *

@create_tpu_optimized_jit(config=TpuCompilationConfig(use_bfloat16=True), donate_argnums=0)
def step(state, batch):
    def loss(w):
        return jnp.mean(jnp.tanh(batch @ w) ** 2)
    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, value

state = {"w": jnp.full((16, 4), 0.25, jnp.float32), "n": jnp.int32(0)}
batch = jnp.ones((8, 16))
path, sha256 = sys.argv[1:]
if sha256 == "pack":
    print(json.dumps({"sha256": pack_program(path, step, (state, batch)).sha256}))
else:
    load_program(path, step, (state, batch), sha256=sha256)
with count_compilations() as counts:
    for _ in range(3):
        state, value = step(state, batch)
    jax.block_until_ready(state)
if sha256 != "pack":
    known = len(step.programs)
    print(json.dumps({"programs": counts.programs, "value": float(value), "n": int(state["n"]), "known": known}))
else:
    print(json.dumps({"value": float(value)}))
"""


def in_another_process(path: Path, sha256: str) -> tuple[list[Any], str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(path), sha256],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_packed_in_one_process_and_run_in_another_without_compiling(tmp_path: Path) -> None:
    (packed, first), errors = in_another_process(tmp_path / "step.caprog", "pack")
    assert errors == ""
    (second,), errors = in_another_process(tmp_path / "step.caprog", packed["sha256"])
    assert errors == ""
    assert second == {"programs": 0, "value": first["value"], "n": 3, "known": 1}


def scaled(x: Any, factor: Any) -> Any:
    return jnp.sin(x) * factor


X = jnp.arange(6.0)
ARGS = (X, jnp.float32(3))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("packed") / "a.caprog"
    pack_program(path, create_tpu_optimized_jit(scaled), ARGS)
    return path.read_bytes()


@pytest.fixture
def packed(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "a.caprog"
    path.write_bytes(content)
    path.chmod(0o644)
    return path


def test_the_same_process_and_a_function_that_keeps_its_other_programs(packed: Path) -> None:
    jitted = create_tpu_optimized_jit(scaled)
    jitted(jnp.ones(2), 1.0)
    program = load_program(packed, jitted, ARGS)
    assert program.from_cache
    with count_compilations() as counts:
        result = jitted(*ARGS)
    assert counts.programs == 0
    np.testing.assert_allclose(result, np.sin(np.arange(6.0)) * 3, rtol=1e-6)
    assert len(jitted.programs) == 2
    assert "loaded from a.caprog" in jitted.explain()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_what_the_file_says(packed: Path) -> None:
    found = read_packed(packed)
    assert found.function == "scaled"
    assert found.inputs == ("x: float32[6]", "factor: float32[]")
    assert found.environment["jax"] == jax.__version__
    assert found.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest()
    assert "scaled(x: float32[6], factor: float32[])" in str(found)


@pytest.mark.parametrize(
    ("function", "args", "config", "reason"),
    [
        (lambda x, factor: jnp.cos(x) * factor, ARGS, None, "was compiled from another program"),
        (scaled, (jnp.ones(7), ARGS[1]), None, r"x: float32\[6\] in the file, x: float32\[7\] here"),
        (scaled, (X, 3.0), None, r"factor: float32\[\] in the file, factor: float32\[\], weak here"),
        (
            scaled,
            ARGS,
            TpuCompilationConfig(compiler_options={"xla_cpu_prefer_vector_width": 128}),
            "compiler options: none in the file, xla_cpu_prefer_vector_width=128 here",
        ),
    ],
)
def test_another_function_input_or_option_is_refused(
    packed: Path, function: Any, args: Any, config: Any, reason: str
) -> None:
    jitted = create_tpu_optimized_jit(function, config=config)
    with pytest.raises(PackedProgramError, match=reason):
        load_program(packed, jitted, args)
    assert jitted.programs == ()


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("jax", "jax"),
        ("jaxlib", "jaxlib"),
        ("compiler", "compiler"),
        ("topology", "devices"),
        ("processor", "type of processor"),
        ("LIBTPU_INIT_ARGS", "LIBTPU_INIT_ARGS"),
    ],
)
def test_another_environment_is_refused_by_name(packed: Path, name: str, title: str) -> None:
    tamper(packed, lambda header: header["environment"].update({name: "another one"}))
    with pytest.raises(
        PackedProgramError, match=f"another environment. {title}: another one in the file, .* here"
    ):
        load_program(packed, create_tpu_optimized_jit(scaled), ARGS)


def test_other_flags_are_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    harmless = "--xla_dump_to=/nowhere --xla_force_host_platform_device_count=4"
    monkeypatch.setenv("XLA_FLAGS", f"{harmless} {' '.join(reversed(flags.split()))}")
    load_program(packed, create_tpu_optimized_jit(scaled), ARGS)
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    with pytest.raises(
        PackedProgramError, match=r"XLA_FLAGS: .* in the file, .*--xla_cpu_enable_fast_math=true"
    ):
        load_program(packed, create_tpu_optimized_jit(scaled), ARGS)


def test_every_difference_is_named() -> None:
    here = {"jax": "0.12.0", "compiler": "b", "XLA_FLAGS": ""}
    assert differences({"jax": "0.10.2", "compiler": "b", "XLA_FLAGS": "--xla_a=1"}, here) == [
        "jax: 0.10.2 in the file, 0.12.0 here",
        "XLA_FLAGS: --xla_a=1 in the file, none here",
    ]


def test_who_may_be_trusted(packed: Path) -> None:
    jitted = create_tpu_optimized_jit(scaled)
    digest = read_packed(packed).sha256
    packed.chmod(0o666)
    with pytest.raises(PackedProgramError, match="others may write to it"):
        load_program(packed, jitted, ARGS)
    with pytest.raises(PackedProgramError, match=f"has the SHA-256 {digest}, expected 00"):
        load_program(packed, jitted, ARGS, sha256="00" * 32)
    load_program(packed, jitted, ARGS, sha256=digest.upper())


def test_trust_is_decided_before_the_file_is_looked_at(packed: Path) -> None:
    jitted = create_tpu_optimized_jit(scaled)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(PackedProgramError, match="has the SHA-256"):
        load_program(packed, jitted, ARGS, sha256="00" * 32)
    packed.chmod(0o666)
    with pytest.raises(PackedProgramError, match="others may write to it"):
        load_program(packed, jitted, ARGS)


def test_the_owner_is_asked_of_the_file_that_was_opened(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks the name may lead to another file."""
    packed.chmod(0o666)
    own = os.stat_result([0o100600, 0, 0, 1, os.geteuid(), 0, 0, 0, 0, 0])
    monkeypatch.setattr(os, "stat", lambda *_, **__: own)
    with pytest.raises(PackedProgramError, match="others may write to it"):
        load_program(packed, create_tpu_optimized_jit(scaled), ARGS)


def test_text_of_a_file_does_not_reach_the_terminal_as_it_is(packed: Path) -> None:
    tamper(packed, lambda header: header["environment"].update(jax="\x1b]0;title\x07"))
    with pytest.raises(PackedProgramError, match=r"jax: \\x1b\]0;title\\x07 in the file"):
        load_program(packed, create_tpu_optimized_jit(scaled), ARGS)


def tamper(path: Path, change: Any, *, program: bytes | None = None) -> None:
    """Change the header of a file, and make its digests right again."""
    content = path.read_bytes()
    magic, version, length = struct.unpack_from("<8sII", content)
    header = json.loads(content[16 : 16 + length])
    stored = content[16 + length : -32]
    if program is not None:
        stored = zlib.compress(program)
        header |= {
            "stored_bytes": len(stored),
            "bytes": len(program),
            "sha256": hashlib.sha256(program).hexdigest(),
        }
    change(header)
    text = json.dumps(header).encode()
    body = struct.pack("<8sII", magic, version, len(text)) + text + stored
    path.write_bytes(body + hashlib.sha256(body).digest())


def test_every_damaged_byte_is_found(packed: Path) -> None:
    content = packed.read_bytes()
    rng = np.random.default_rng(0)
    for position in [*range(48), *rng.integers(0, len(content), 200), len(content) - 1]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        packed.write_bytes(damaged)
        with pytest.raises(PackedProgramError):
            read_packed(packed)
    for length in (0, 1, 16, 47, 48, len(content) // 2, len(content) - 1):
        packed.write_bytes(content[:length])
        with pytest.raises(PackedProgramError):
            read_packed(packed)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.clear(),
        lambda header: header.update(function=3),
        lambda header: header.update(bytes=-1),
        lambda header: header.update(bytes=1 << 62),
        lambda header: header.update(bytes=True),
        lambda header: header.update(bytes=header["bytes"] - 1),
        lambda header: header.update(stored_bytes=header["stored_bytes"] + 1),
        lambda header: header.update(sha256="0" * 64),
        lambda header: header.update(inputs={"a": 1}),
        lambda header: header.update(environment=["a"]),
        lambda header: header.update(environment={"jax": 1}),
    ],
)
def test_hostile_headers_are_refused(packed: Path, change: Any) -> None:
    tamper(packed, change)
    with pytest.raises(PackedProgramError, match="is invalid"):
        read_packed(packed)


def test_a_program_that_inflates_to_more_than_it_says_is_refused(packed: Path) -> None:
    tamper(packed, lambda header: header.update(bytes=100), program=b"\0" * (50 << 20))
    with pytest.raises(PackedProgramError, match="the size or digest of its program"):
        read_packed(packed)


def test_code_that_the_runtime_does_not_take_is_refused(packed: Path) -> None:
    tamper(packed, lambda header: None, program=b"\0\0\0\0" + b"not a program" * 10)
    jitted = create_tpu_optimized_jit(scaled)
    with pytest.raises(PackedProgramError, match="refused the program"):
        load_program(packed, jitted, ARGS)
    assert jitted.programs == ()
    np.testing.assert_allclose(jitted(*ARGS), np.sin(np.arange(6.0)) * 3, rtol=1e-6)


def test_what_is_not_a_file_or_a_function(tmp_path: Path, packed: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_packed(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read_packed(tmp_path / "missing")
    for call in (pack_program, load_program):
        with pytest.raises(PackedProgramError, match="expected one made by create_tpu_optimized_jit"):
            call(packed, jax.jit(scaled), ARGS)  # type: ignore[arg-type]


SHARDED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.compilation import *

count = int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()[:count]), ("data",))

@create_tpu_optimized_jit
def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss

w = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P()))
x = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(8, 16) / 64, NamedSharding(mesh, P("data")))
if sys.argv[3] == "pack":
    print(pack_program(sys.argv[1], step, (w, x)).environment["topology"], file=sys.stderr)
else:
    load_program(sys.argv[1], step, (w, x))
with count_compilations() as counts:
    for _ in range(3):
        w, loss = step(w, x)
    jax.block_until_ready(w)
print(json.dumps([counts.programs, float(loss), len(w.sharding.device_set), len(step.recompilations)]))
"""


@pytest.mark.slow
def test_a_program_on_a_mesh_of_emulated_devices(tmp_path: Path) -> None:
    def run(count: int, what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", SHARDED, str(tmp_path / "a.caprog"), str(count), what],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    packed = run(4, "pack")
    assert packed.returncode == 0, packed.stderr
    _, loss, devices, _ = json.loads(packed.stdout)
    loaded = run(4, "load")
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == [0, loss, devices, 0]
    assert devices == 4
    other = run(2, "load")
    assert other.returncode == 1
    assert "devices: 4 × cpu numbered 0 1 2 3, 1 processes in the file, 2 × cpu" in other.stderr
