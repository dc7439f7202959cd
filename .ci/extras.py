"""Installs each extra alone into an environment of its own, and runs the first command of every page that needs it; of
planning all of them.

    python .ci/extras.py [EXTRA …]

`base` is the package without extras. It is installed once; the environment of an extra is a copy of that (hard links)
into which pip then puts what the extra adds, so that each holds exactly what a user gets. One environment at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    *("num_layers=1", "embed_dim=16", "num_heads=2", "num_kv_heads=2", "train.steps=2", "train.batch_size=2"),
    *("train.sequence_length=16", "train.eval_batches=1", "optimizer.warmup_steps=1"),
]
ORDINARY = "import capibara.ops, capibara.jax as jax; assert jax.numpy.ones(3).sum() == 3"

# Where nothing can be read but the file's own bytes: safetensors, the package, belongs to an extra.
WRITE_TENSORS = """import json, struct
header = json.dumps({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}).encode()
open("model.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + bytes(64))"""


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}


class Failed(Exception):
    """A command did not do what its page says."""


class Environment:
    """A virtual environment, and an empty folder to work in."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.python = folder / "bin" / "python"
        self.work = work
        keep = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("PYTHON", "CAPIBARA_", "JAX_", "XLA_", "TPU_"))
        }
        self.variables = {
            **keep,
            "XDG_CACHE_HOME": str(work / "cache"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }

    def run(self, *command: str, quiet: bool = False, code: int = 0) -> str:
        """What a command prints; it must end with ``code``, and with ``quiet`` print nothing on standard error."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        words = " ".join(command)[:300]
        if done.returncode != code:
            raise Failed(
                f"{words}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        if (quiet and done.stderr) or re.search(
            r"tpu.*(error|warning)|E0000|Traceback", done.stderr, re.IGNORECASE
        ):
            raise Failed(f"{words}\nprinted on standard error:\n{done.stderr[-4000:]}")
        return done.stdout

    def page(self, page: str, line: str, *more: str, code: int = 0) -> str:
        """Run a command line that a page shows, with ``more`` arguments that make it small."""
        if line not in (ROOT / page).read_text(encoding="utf-8"):
            raise Failed(f"{page} no longer shows {line!r}: change .ci/extras.py with it")
        return self.run(*line.split(), *more, code=code)

    def blocks(self, page: str, *containing: str) -> None:
        """Run blocks of Python of a page as one program: the first that holds each text."""
        found = re.findall(
            r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        chosen = []
        for text in containing:
            block = next((each for each in found if text in each), None)
            if block is None:
                raise Failed(f"{page} has no block of Python with {text!r}: change .ci/extras.py with it")
            chosen.append(block)
        self.run(str(self.python), "-c", "\n".join(chosen))


def base(e: Environment) -> None:
    e.run(str(e.python), "-c", ORDINARY, quiet=True)
    e.page("docs/hardware.md", "capibara doctor")
    (e.work / "src").mkdir()
    (e.work / "src" / "model.py").write_text("import jax\n")
    e.page("docs/migrate.md", "capibara migrate src/")
    e.run(str(e.python), "-c", WRITE_TENSORS)
    e.page("docs/compress.md", "capibara compress model.safetensors model.capi")
    e.blocks("README.md", "model = ml.Model()")
    line = "capibara plan --config production/tpu_v4 --topology v4-32"
    e.page("docs/plan.md", line, "--no-compile")


def train(e: Environment) -> None:
    (e.work / "notes").mkdir()
    (e.work / "notes" / "a.txt").write_text("Capibaras swim. " * 400)
    (e.work / "book.txt").write_text("They rest in the sun. " * 200)
    line = "capibara train --config demo notes/ book.txt checkpoint.directory=runs/notes"
    e.page("docs/train.md", line, *SMALL)
    e.run("capibara", "generate", "--checkpoint", "runs/notes", "--prompt", "Once", "--length", "8")


def plan(e: Environment) -> None:
    e.run(str(e.python), "-c", ORDINARY, quiet=True)
    line = "capibara plan --config production/tpu_v4 --topology v4-32"
    # The compiler takes minutes for the page's own sizes.
    model = [
        "num_layers=2",
        "embed_dim=256",
        "num_heads=4",
        "num_kv_heads=4",
        "mlp_dim=512",
        "vocab_size=1024",
    ]
    small = [
        *model,
        "train.sequence_length=256",
        "train.batch_size=16",
        "--max-compiles",
        "1",
        "--workers",
        "1",
    ]
    shown = [e.page("docs/plan.md", line, *small, "--report", "plan.html")]
    lock = "capibara plan --config production/tpu_v4 --topology v5e:2x4 train.batch_size=64 --lock plan.lock"
    shown.append(e.page("docs/plan.md", lock, *small))
    e.page("docs/plan.md", "capibara plan --check plan.lock")
    large = "capibara plan --config production/tpu_v4 --topology v5e:2x2 --memory-limit 4 --explain"
    less = ["--memory-limit", "0.01"]
    if "The largest buffers" not in (out := e.page("docs/plan.md", large, *small, *less, code=1)):
        raise Failed(f"--explain explains nothing:\n{out}")
    (e.work / "Llama-3.1-8B").mkdir()
    (e.work / "Llama-3.1-8B" / "config.json").write_text(json.dumps(LLAMA))
    further = "capibara plan --model Llama-3.1-8B --topology v5p:2x2x2 train.sequence_length=4096 train.batch_size=8"
    e.page("docs/families.md", further, "train.sequence_length=128", "--no-compile")
    line = "capibara plan --serve --config production/tpu_v4 --topology v4:2x2x1,v5e:2x2 --prompt-length 512"
    served = ["--output-length", "128", "--topology", "v5e:2x2", "--max-compiles", "4", "--workers", "1"]
    shown.append(e.page("docs/plan/serving.md", line, *model, *served))
    e.blocks("docs/plan.md", "work = step_work(")
    for out in shown:
        if re.search(r"nothing was compiled|not installed|figures may be off", out):
            raise Failed(f"capibara plan did not use the TPU compiler that JAX pins:\n{out}")


def torch(e: Environment) -> None:
    e.blocks("docs/compose/interchange.md", "ml.from_torch(module")


def export(e: Environment) -> None:
    e.blocks("docs/compose/interchange.md", "ml.from_jax(lambda a, b", "params={", "ml.load_exported(")


def onnx(e: Environment) -> None:
    e.blocks("docs/compose/interchange.md", "ml.from_jax(lambda a, b", "ml.export_onnx(")


def text(e: Environment) -> None:
    (e.work / "notes").mkdir()
    (e.work / "notes" / "a.txt").write_text("Capibaras swim. " * 400)
    e.page("docs/tokenizers.md", "capibara tokenizer train notes/ --vocab-size 8192 --output tokenizer")
    e.blocks("docs/tokenizers.md", "render_chat")


def data(e: Environment) -> None:
    e.blocks("docs/data.md", "PackedBatches")


def gguf(e: Environment) -> None:
    e.blocks("docs/interop.md", "tiny.gguf")


def serve(e: Environment) -> None:
    e.page("docs/serve.md", "capibara serve", "--help")
    e.blocks("docs/serve.md", "create_app(")


EXTRAS: dict[str, Callable[[Environment], None]] = {
    each.__name__: each for each in (base, train, plan, text, data, gguf, torch, export, onnx, serve)
}


def pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *arguments], check=True)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in EXTRAS]
    if unknown:
        print(f"unknown extra {unknown[0]!r}; known: {', '.join(EXTRAS)}", file=sys.stderr)
        return 2
    failed = []
    with tempfile.TemporaryDirectory(prefix="capibara-extras-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
        environment = {**os.environ, "CAPIBARA_REUSE_LIBRARY": "1"}
        subprocess.run(build, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = place.glob("*.whl")
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "venv", str(place / "base")], check=True)
        pip(place / "base" / "bin" / "python", str(wheel))
        # Compiles what every copy imports, once.
        subprocess.run([str(place / "base" / "bin" / "python"), "-c", ORDINARY], cwd=place, check=True)
        for name in names or EXTRAS:
            where = place / "extra"
            work = place / "work"
            work.mkdir()
            # Symbolic links stay what they are: bin/python leads out of the environment.
            shutil.copytree(place / "base", where, symlinks=True, copy_function=os.link)
            try:
                what = str(wheel) if name == "base" else f"{wheel}[{name}]"
                # Again, so that the commands in bin/ name this copy's interpreter.
                pip(where / "bin" / "python", "--force-reinstall", "--no-deps", str(wheel))
                pip(where / "bin" / "python", what)
                installed = time.perf_counter()
                EXTRAS[name](Environment(where, work))
                seconds = (
                    f"{installed - start:.0f} s to install, {time.perf_counter() - installed:.0f} s to run"
                )
                print(f"{name}: passed ({seconds})", flush=True)
            except (Failed, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{name}: FAILED\n{error}", flush=True)
                failed.append(name)
            shutil.rmtree(where)
            shutil.rmtree(work)
            start = time.perf_counter()
    count = len(names or EXTRAS)
    print(
        f"extras: {count - len(failed)} of {count} passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
