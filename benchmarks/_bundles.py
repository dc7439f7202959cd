"""Scheduled bundles of Pallas kernels, as the TPU compiler writes them down on a machine that has no TPU.

A TPU core starts one bundle of instructions a cycle, and the compiler schedules them before the program runs. So the
bundles of a loop's body say what one pass costs if memory and its copies keep up: a figure of the compiler's, not a
measured time.

:func:`count` compiles functions in a process of its own, because ``libtpu`` takes its flags when it starts and must
stay out of processes that compute.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Kernel", "NotCompiledError", "Part", "count", "parts", "read_kernel", "read_part"]

KINDS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *:[ >]*\{", re.MULTILINE)
_KERNEL = re.compile(r"/\* entry bundle: %\S+ = custom-call\(")
_BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%p\w+\) )?target = \$region(\d+)")
_START = re.compile(r"\bStart(?:/End empty)? region (\d+)")
_PRODUCT = re.compile(r"\bvmatmul\.")
_SPILL = re.compile(r"\bvst \[vmem:\[#allocation\d+_spill\]")


class NotCompiledError(RuntimeError):
    """The compiler refused a program; the text is its first words."""


@dataclass(frozen=True)
class Kernel:
    """What the final bundles of one kernel say.

    Attributes:
      name: as ``pallas_call`` names it.
      bundles: all of them.
      step: of one step of the grid, without what stands under conditions.
      bodies: of each condition's body that multiplies matrices, in the order of the program.
      spills: vector registers stored because there were too few, in those bodies.
    """

    name: str
    bundles: int
    step: int
    bodies: tuple[int, ...]
    spills: tuple[int, ...]

    @property
    def block(self) -> int:
        """Bundles of a block that is not masked: the shortest body where masked blocks have one of their own."""
        return min(self.bodies)

    @property
    def masked_block(self) -> int:
        return max(self.bodies)


@dataclass(frozen=True)
class Part:
    """A loop or the body of a condition in the final bundles of a kernel.

    Attributes:
      bundles: all of it, what it contains included.
      products: instructions that multiply matrices.
      loop: whether it is a loop; otherwise the body of a condition.
      inside: loops and bodies that it contains directly, in the order of the program.
    """

    bundles: int
    products: int
    loop: bool
    inside: tuple[Part, ...]

    def within(self) -> list[Part]:
        """All parts that it contains."""
        return [each for part in self.inside for each in (part, *part.within())]

    @property
    def has_loop(self) -> bool:
        return any(part.loop for part in self.within())


def _branches(text: str) -> tuple[list[str], list[tuple[int, int]], list[tuple[int, int]]]:
    """The bundles of a dump; ends and beginnings of its loops; branches of its conditions and their targets."""
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    bundles = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    regions: dict[str, int] = {}
    for i, bundle in enumerate(bundles):
        for number in _START.findall(bundle):
            regions.setdefault(number, i)
    loops, conditions = [], []
    for i, bundle in enumerate(bundles):
        for number in _BRANCH.findall(bundle):
            # The program's end has no bundle that says its number.
            target = regions.get(number, len(bundles))
            (conditions if target > i else loops).append((i, target))
    return bundles, loops, conditions


def read_part(name: str, text: str) -> Part:
    """The loop over the grid, the longest of a dump of final bundles, and what it contains.

    Raises:
      ValueError: no loop.
    """
    bundles, loops, conditions = _branches(text)
    if not loops:
        raise ValueError(f"{name}: no loop over a grid in {len(bundles)} bundles")
    spans = [(first, end + 1, True) for end, first in loops]
    spans += [(at + 1, target, False) for at, target in conditions if target > at + 1]
    # Outer ones first; a condition around exactly the same bundles as another one is that one.
    spans = sorted(set(spans), key=lambda span: (span[0], -span[1], not span[2]))
    grid = max((span for span in spans if span[2]), key=lambda span: span[1] - span[0])

    def build(span: tuple[int, int, bool], rest: list[tuple[int, int, bool]]) -> Part:
        first, end, loop = span
        own = [each for each in rest if first <= each[0] and each[1] <= end]
        inside, at = [], first
        for i, each in enumerate(own):
            if each[0] >= at:
                inside.append(build(each, own[i + 1 :]))
                at = each[1]
        products = sum(len(_PRODUCT.findall(bundle)) for bundle in bundles[first:end])
        return Part(end - first, products, loop, tuple(inside))

    return build(grid, spans[spans.index(grid) + 1 :])


def read_kernel(name: str, text: str) -> Kernel:
    """Read a dump of final bundles: ``ADDRESS [label] : > { slot ;; slot … }``.

    A branch forward jumps over the body of a condition, and one backward closes a loop: the loop over the grid is the
    longest.

    Raises:
      ValueError: no loop, a loop inside a body (whose passes the text does not say), or no matrix product.
    """
    bundles, loops, conditions = _branches(text)
    if not loops:
        raise ValueError(f"{name}: no loop over a grid in {len(bundles)} bundles")
    end, first = max(loops, key=lambda loop: loop[0] - loop[1])
    inside = [(a, b) for a, b in conditions if first <= a and b <= end]
    products = [(a, b) for a, b in inside if _has_product(bundles[a + 1 : b])]
    # A block's body is the innermost condition around matrix products; those around it hold on every step.
    around = {(a, b) for a, b in products if any(a < c and d <= b for c, d in products)}
    bodies = [(a, b) for a, b in products if (a, b) not in around]
    if not bodies and _has_product(bundles[first : end + 1]):
        bodies = [(first - 1, end + 1)]  # a step of the grid is a block
    if not bodies:
        raise ValueError(f"{name}: no matrix product in {len(bundles)} bundles")
    if any(a < loop < b for a, b in bodies for loop, _ in loops if loop != end):
        raise ValueError(f"{name}: a loop inside a block's body, whose passes the dump does not say")
    apart = [(a, b) for a, b in inside if (a, b) not in around]
    apart = [(a, b) for a, b in apart if not any(c < a and b <= d for c, d in apart)]
    step = end - first + 1 - sum(b - a - 1 for a, b in apart)
    spills = (sum(len(_SPILL.findall(bundle)) for bundle in bundles[a + 1 : b]) for a, b in bodies)
    return Kernel(name, len(bundles), step, tuple(b - a - 1 for a, b in bodies), tuple(spills))


def _has_product(bundles: Iterable[str]) -> bool:
    return any(_PRODUCT.search(bundle) for bundle in bundles)


def count(kind: str, source: str, cases: Sequence[dict[str, Any]], keep: Path | None = None) -> list[Any]:
    """Compile functions for a kind of TPU and count their kernels' bundles.

    Args:
      kind: one of ``KINDS``.
      source: ``module:function``; ``function(**case)`` gives a function and the shapes and dtypes of its arguments.
      cases: arguments of ``source``.
      keep: a folder for the dumps, which otherwise are deleted.

    Returns:
      For each case the kernels of its program by name, or a :class:`NotCompiledError`.
    """
    return [_result(found, _kernel) for found in _compile(kind, source, cases, keep, "read_kernel")]


def parts(kind: str, source: str, cases: Sequence[dict[str, Any]]) -> list[Any]:
    """As :func:`count`, for kernels whose steps contain loops.

    Returns:
      For each case ``{"kernels": {name: Part}, "program": its text}``, or a :class:`NotCompiledError`.
    """
    found = _compile(kind, source, cases, None, "read_part")
    texts = [{} if "error" in each else {"program": each.pop("program")} for each in found]
    kernels = [_result(each, lambda _, one: _part(one)) for each in found]
    return [
        each if isinstance(each, NotCompiledError) else {"kernels": each, **text}
        for each, text in zip(kernels, texts, strict=True)
    ]


def _compile(
    kind: str, source: str, cases: Sequence[dict[str, Any]], keep: Path | None, reader: str
) -> list[dict[str, Any]]:
    from capibara.plan.compiler import find_compiler

    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        dumps = keep or Path(folder)
        environment = find_compiler().environment()
        environment["PYTHONPATH"] = f"{root}:{environment['PYTHONPATH']}"
        environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps}"
        job = json.dumps(
            {
                "kind": kind,
                "source": source,
                "cases": list(cases),
                "dumps": str(dumps),
                "keep": keep is not None,
                "reader": reader,
            }
        )
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks._bundles"],
            input=job,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the process that compiles ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _kernel(name: str, one: dict[str, Any]) -> Kernel:
    return Kernel(name, one["bundles"], one["step"], tuple(one["bodies"]), tuple(one["spills"]))


def _part(one: dict[str, Any]) -> Part:
    return Part(one["bundles"], one["products"], one["loop"], tuple(map(_part, one["inside"])))


def _result(found: dict[str, Any], made: Callable[[str, dict[str, Any]], Any]) -> Any:
    if "error" in found:
        return NotCompiledError(found["error"])
    return {name: made(name, one) for name, one in found.items()}


def _work() -> None:
    """In the process that compiles: a job on standard input, the kernels as the last line of standard output."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    job = json.load(sys.stdin)
    module, _, name = job["source"].partition(":")
    source = getattr(importlib.import_module(module), name)
    more = {"chip_config_name": "megacore"} if job["kind"] == "v4" else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=KINDS[job["kind"]], **more).devices
    one = SingleDeviceSharding(devices[0])
    results = []
    for case in job["cases"]:
        function, shapes = source(**case)
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in shapes]
        try:
            compiled = jax.jit(function).lower(*given).compile()
        except jax.errors.JaxRuntimeError as error:
            results.append({"error": str(error).strip()[:300]})
        else:
            results.append(_kernels(Path(job["dumps"]), globals()[job["reader"]]))
            if job["reader"] == "read_part":
                results[-1]["program"] = re.sub(r'"body":"[^"]*"', "", compiled.as_text() or "")
        if not job["keep"]:
            for path in Path(job["dumps"]).iterdir():
                path.unlink()
    print(json.dumps(results))


def _kernels(folder: Path, read: Callable[[str, str], Any]) -> dict[str, Any]:
    """By name; fusions of XLA have dumps of their own, which are left out."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        text = path.read_text(encoding="utf-8")
        if _KERNEL.search(text, 0, 20000) and "schedule-analysis" not in path.name:
            name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name)
            name = re.sub(r"\.\d+$", "", name)
            found[name] = asdict(read(name, text))
    return found


if __name__ == "__main__":
    _work()
