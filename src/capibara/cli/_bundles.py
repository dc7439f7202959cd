"""``capibara serve --compile-for``: the programs of a server, compiled on a machine without the devices."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from capibara.cli._archives import on_terminal
from capibara.cli._models import find_config, is_archive, load_source, warn_on_stderr
from capibara.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["HERE", "add_bundle_arguments", "compile_bundle", "devices_wanted", "say_compiled", "serving_mesh"]

HERE = "here"
_TAKEN = (
    "model",
    "compile_for",
    "output",
    "max_batch",
    "max_length",
    "pages",
    "guess",
    "cache_dtype",
    "tensor_parallel",
    "quiet",
)
_CHILD = (
    "import json, sys; from capibara.cli import _bundles; _bundles.compile_described(json.load(sys.stdin))"
)


def add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of programs that are compiled before."""
    parser.add_argument(
        "--compile-for",
        metavar="SLICE",
        help="do not serve: compile all programs for the chips of one host, such as v4:2x2x1 or v5e:2x4, and write "
        "them to --output; no such chip is needed, and of a published model only config.json and the tokenizer. "
        f"{HERE!r}: for this machine",
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", help="with --compile-for: where the programs go")
    parser.add_argument(
        "--bundle",
        metavar="FOLDER",
        help="programs that --compile-for wrote: nothing is compiled, and what they were compiled for says how many "
        "texts there are at once, their length and the mesh",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="divide the model among so many devices (default: all of a TPU host or of --compile-for; elsewhere, and "
        "for a compressed file, 1)",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16", "float16", "int8"),
        help="of keys and values (default: that of the model's arithmetic); int8 are codes with scales",
    )
    parser.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="of 16 tokens, for keys and values (default: what memory holds)",
    )


def say_compiled(done: int, total: int) -> None:
    """A line of progress on a terminal."""
    if on_terminal():
        print(
            f"\rcompiled {done} of {total} programs",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


def devices_wanted(args: argparse.Namespace) -> int | None:
    """The argument of :func:`serving_mesh`: a compressed file, whose codes are not divided, is on one device."""
    return 1 if args.tensor_parallel is None and is_archive(args.model) else args.tensor_parallel


def serving_mesh(count: int | None, axes: dict[str, int] | None = None) -> Mesh | None:
    """The mesh over this machine's devices that a model is divided over; None for one device.

    Args:
      count: devices; by default all of a TPU host, and one elsewhere. axes: of a bundle, instead.

    Raises:
      ConfigError: there are fewer devices.
    """
    import jax

    from capibara.hardware import build_mesh

    if axes is not None:
        if not axes:
            return None
        wanted, sizes, where = list(axes), list(axes.values()), "--bundle"
    else:
        devices = jax.local_devices()
        size = len(devices) if count is None and devices[0].platform == "tpu" else count or 1
        if size == 1:
            return None
        wanted, sizes, where = ["data", "model"], [1, size], f"--tensor-parallel {size}"
    if jax.process_count() > 1:
        raise ConfigError("capibara serve: a model is served by one process. Start it on one host alone")
    needed = 1
    for size in sizes:
        needed *= size
    if needed > jax.device_count():
        raise ConfigError(f"{where}: needs {needed} devices, there are {jax.device_count()}")
    return build_mesh(sizes, wanted, jax.devices()[:needed])


def compile_bundle(args: argparse.Namespace) -> int:
    """Compile, and return 0."""
    if args.output is None:
        raise ConfigError("--compile-for: needs --output FOLDER, where the programs go")
    for name in ("bundle", "draft_model", "adapter", "load_adapters"):
        if getattr(args, name):
            raise ConfigError(
                f"--compile-for cannot be combined with --{name.replace('_', '-')}, whose programs no bundle has"
            )
    for name, least, most in (("pages", 1, (1 << 31) - 2), ("guess", 1, 16), ("max_batch", 1, 4096)):
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')}: got {value}, expected an integer from {least} to {most}"
            )
    given = {name: getattr(args, name) for name in _TAKEN}
    if args.compile_for == HERE:
        return _compile_here(given, decode=True if args.decode else "auto")
    from capibara.plan.compiler import find_compiler
    from capibara.plan.slices import parse_slice

    parse_slice(args.compile_for)
    if is_archive(args.model):
        raise ConfigError(
            f"--compile-for {args.compile_for}: {args.model!r} is a compressed file, whose programs are compiled on "
            f"the devices themselves (--compile-for {HERE}). Name the folder of a model"
        )
    find_config(args.model)  # what is wrong with it is said here
    # The compiler wants to be alone in a process, with an environment of its own.
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps(given),
        text=True,
        env=find_compiler().environment(),
        check=False,
    )
    return child.returncode


def _compile_here(given: dict[str, Any], *, decode: bool | str) -> int:
    import jax

    mesh = serving_mesh(devices_wanted(argparse.Namespace(**given)))
    loaded = load_source(given["model"], quiet=given["quiet"], decode=decode, mesh=mesh)
    device = jax.local_devices()[0]
    _write(given, loaded.model, loaded.params, loaded.state, f"{device.device_kind} (this machine)", None)
    return 0


def compile_described(given: dict[str, Any]) -> None:
    """Compile in this process, which does nothing else, and end it."""
    from capibara.errors import CapibaraError

    try:
        _compile_described(given)
    except (CapibaraError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _compile_described(given: dict[str, Any]) -> None:
    from capibara.core import ModularCapibaraModel
    from capibara.plan.compiler.devices import describe_mesh
    from capibara.plan.slices import parse_slice
    from capibara.serve.engine.arrays import describe_arrays
    from capibara.serve.loaded import take_tokenizer

    target = parse_slice(given["compile_for"])
    config, tokenizer = find_config(given["model"])
    count = target.num_devices if given["tensor_parallel"] is None else given["tensor_parallel"]
    if count != target.num_devices:
        raise ConfigError(
            f"--tensor-parallel {count}: {target} has {target.num_devices} devices, and the programs are for all of "
            "them. Name a smaller slice"
        )
    mesh, _ = describe_mesh(target, (("data", 1), ("model", count)))
    hosts = {device.process_index for device in mesh.devices.flat}
    if len(hosts) > 1:
        raise ConfigError(
            f"--compile-for {given['compile_for']}: has {len(hosts)} hosts, and a model is served by one process. Name "
            "the chips of one host, such as v4:2x2x1, v5p:2x2x1, v5e:2x4 or v6e:2x4"
        )
    model = ModularCapibaraModel(config, mesh=mesh)
    take_tokenizer(model, tokenizer)
    if not model.tokenizer_files and not is_bytes(model):
        warn_on_stderr(
            f"{given['model']!r} has no tokenizer.json: the programs are for bytes, and do not fit where there is one"
        )
    params, state = describe_arrays(model)
    _write(given, model, params, state, str(target), target.usable_hbm_bytes)


def is_bytes(model: Any) -> bool:
    """Whether a model has no more token ids than its tokenizer, which is of bytes where it has no files."""
    return model.config.model.vocab_size <= model.tokenizer.vocab_size


def _write(
    given: dict[str, Any], model: Any, params: Any, state: Any, target: str, memory_bytes: int | None
) -> None:
    from capibara.serve.engine.bundle import write_bundle
    from capibara.serve.engine.speculation import Speculation, check_speculation
    from capibara.serve.engine.steps import EngineSizes

    begun = time.perf_counter()
    sizes = EngineSizes.of(
        model,
        max_batch=16 if given["max_batch"] is None else given["max_batch"],
        max_length=given["max_length"],
        guesses=given["guess"] or 0,
        cache_dtype=given["cache_dtype"],
    )
    if given["guess"]:
        check_speculation(Speculation(given["guess"]), model, sizes.max_length)
    bundle = write_bundle(
        given["output"],
        model,
        params,
        state,
        sizes,
        target=target,
        writable=min(model.config.model.vocab_size, model.tokenizer.vocab_size),
        memory_bytes=memory_bytes,
        pages=given["pages"],
        progress=None if given["quiet"] else say_compiled,
    )
    print(
        f"{len(bundle.files)} programs for {target} in {bundle.folder} ({time.perf_counter() - begun:.0f} s): "
        f"{sizes.max_batch} texts of {sizes.max_length} tokens, {bundle.sizes.pages - 1} pages. Serve with --bundle "
        f"{bundle.folder}"
    )
