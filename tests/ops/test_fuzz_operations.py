"""The fuzzer of the operations: it covers them all, finds what is planted, and finds nothing else in a few problems.

``make fuzz-ops`` runs it at length.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from fuzz_ops.case import Arg, Family, compare
from fuzz_ops.plant import plant
from fuzz_ops.table import OPERATIONS
from fuzz_ops.ways import WAYS
from fuzz_ops.worker import family_of, run_family, ways_of
from operation_calls import functions

from capibara.jax.tpu_v4 import backend
from capibara.ops import list_ops

# Which arguments have no effect is for test_arguments_without_effect.py.
pytestmark = pytest.mark.filterwarnings("ignore::capibara.ops.OpWarning")

# Of several categories, and quick to compile.
QUICK = (
    "attention.write_pages",
    "collective.optimized_all_gather",
    "linalg.cholesky_update",
    "tropical.scan",
)
# With a fault planted in each: every way that there is has to find it.
PLANTED = ("conv.causal_conv1d!value", "scan.selective_scan!gradient")


def test_every_operation_is_fuzzed():
    assert set(OPERATIONS) == set(functions())


def test_documented_methods_are_operations_that_are_fuzzed():
    faces = [getattr(backend, name) for name in backend.__all__ if name.endswith("Ops")]
    methods = [f for face in faces for name, f in vars(face).items() if not name.startswith("_")]
    assert len(methods) > 40
    ours = list(functions().values())
    assert [m for m in methods if m.__func__ not in ours] == []


# For other hardware; interpreted here, and too slow for more than a few problems by `make fuzz-ops`.
ELSEWHERE = {"pallas_tpu", "pallas_gpu"}


@pytest.mark.parametrize("op", sorted(list_ops()))
def test_every_implementation_for_this_processor_is_named(op):
    faces = [name for name, f in functions().items() if getattr(f, "__capibara_op__", None) == op]
    assert faces
    labels = " ".join(family_of(name, 0, number)[0].label for name in faces for number in range(200))
    missing = [n for n in list_ops()[op].implementations if n not in ELSEWHERE and f"'{n}'" not in labels]
    # What "auto" alone reaches: whole numbers of eight bits where they are asked for, loops where steps fit.
    assert set(missing) <= {"async_all_reduce": {"int8"}, "parallel_scan": {"native", "affine"}}.get(
        op, set()
    )


@pytest.fixture(scope="module")
def found() -> list[dict[str, object]]:
    """A few problems of a few operations, in the process that has devices."""
    what = {"operations": (*QUICK, *PLANTED), "problems": 2, "draws": 4, "seed": 0, "numbers": [0]}
    done = subprocess.run(
        [sys.executable, "-m", "fuzz_ops.worker", json.dumps(what)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": emulated(8, quick=True),
            "PYTHONPATH": os.pathsep.join([*sys.path]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line[3:]) for line in done.stdout.splitlines() if line.startswith("ROW")]


@pytest.mark.slow
def test_nothing_is_wrong_in_a_few_problems(found):
    found = [row for row in found if row["op"] in QUICK]
    assert len(found) == len(QUICK)
    assert {way["way"] for row in found for way in row["ways"]} >= {
        "value",
        "jit",
        "vmap",
        "grad",
        "shard_map",
    }
    wrong = [
        (row["op"], row["label"], way["way"], way["wrong"])
        for row in found
        for way in row["ways"]
        if way["wrong"]
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("op", PLANTED)
def test_every_way_finds_what_is_planted_in_an_operation(found, op):
    (row,) = (row for row in found if row["op"] == op)
    missed = {way["way"] for way in row["ways"] if not way["wrong"]}
    blind = {"grad", "grad2"} if op.endswith("!value") else {"value", "jit"}
    assert {way["way"] for way in row["ways"]} >= {
        "jit",
        "vmap",
        "grad",
        "explicit",
        "shard_map",
        "unchecked",
    }
    assert missed <= blind


def test_a_first_family_of_one_way_does_not_hide_the_others():
    assert family_of("collective.async_all_reduce", 1, 0)[0].refused >= {"jit", "grad"}
    assert ways_of("collective.async_all_reduce", 1) == {*WAYS}


def square(x):
    return x * x


def planted(**changes):
    family = Family("square", square, lambda x: [x * x], (Arg((3,)),), differentiable=(0,), twice=True)
    family = dataclasses.replace(family, refused=frozenset({"explicit", "shard_map", "unchecked"}), **changes)
    return {row["way"]: row for row in run_family(family, np.random.default_rng(0), draws=4)}


def test_what_is_right_passes_in_every_way():
    ways = planted()
    assert set(ways) == {"value", "jit", "vmap", "grad", "grad2"}
    assert [row["wrong"] for row in ways.values()] == [[]] * 5
    assert all(row["problems"] >= 4 for row in ways.values())


def _detached(x):
    return 0.9 * x * x + 0.1 * jax.lax.stop_gradient(x * x)


@pytest.mark.parametrize(
    ("call", "ways"),
    [
        (lambda x: x * x + 1e-3, {"value", "jit", "vmap"}),
        (
            lambda x: x * x * jnp.where(jnp.arange(3) == 2, jnp.nan, 1),
            {"value", "jit", "vmap", "grad", "grad2"},
        ),
        (_detached, {"vmap", "grad", "grad2"}),
    ],
    ids=["a little off", "NaN in one place", "a gradient that lacks a tenth"],
)
def test_what_is_planted_is_found(call, ways):
    found = planted(call=call)
    assert {way for way, row in found.items() if row["wrong"]} == ways


def test_a_maximum_that_changes_hands_near_by_is_not_a_finding():
    """The values are a millionth apart: less than the first differences' step."""

    def fix(arrays, rng):
        return [np.array([1.0, 1.0 - 1e-6, 0.0])]

    found = planted(
        call=jnp.max, oracle=lambda x: [np.max(x)], fix=fix, twice=False, moods=("normal",), x64=True
    )
    assert [row["wrong"] for row in found.values()] == [[]] * 4


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        ("value", {"value", "jit", "vmap", "grad", "grad2"}),
        ("gradient", {"vmap", "grad", "grad2"}),
        ("second", {"grad2"}),
    ],
)
def test_what_is_planted_in_a_family_is_found(fault, ways):
    family = Family("square", square, lambda x: [x * x], (Arg((3,)),), differentiable=(0,), twice=True)
    found = planted(call=plant(family, fault).call, moods=("normal",))
    assert {way for way, row in found.items() if row["wrong"]} == ways


def test_an_exception_is_a_finding():
    def broken(x):
        raise IndexError("planted")

    found = planted(call=broken)
    assert all("planted" in row["wrong"][0] for row in found.values())


@pytest.mark.parametrize(
    ("got", "want", "wrong"),
    [
        ([1.0, np.inf], [1.0, np.inf], False),
        ([1.0, np.inf], [1.0, -np.inf], True),
        ([1.0, np.nan], [1.0, np.inf], True),
        ([np.nan], [np.nan], False),
        ([1.0], [np.nan], True),
        ([1.0 + 1e-4], [1.0], True),
        ([1.0 + 1e-7], [1.0], False),
        ([[1.0]], [1.0], True),
    ],
)
def test_infinities_and_shapes_are_compared(got, want, wrong):
    assert (compare(np.array(got), np.array(want), 1e-5) is not None) == wrong


def test_integers_are_compared_exactly():
    assert compare(np.array([1, 2]), np.array([1, 3]), 1.0) is not None
