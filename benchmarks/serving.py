"""Texts written by the engine against its peers, and what weights in codes gain; two cores.

A Llama-shaped decoder of 101 million parameters with random weights, written by ``transformers`` and read by each side
from its folder, in float32 and in bfloat16, as most models are published. Prompts of 64 random tokens, 64 greedy tokens
each, one text and eight at once; all sides have to write the same tokens first, in bfloat16 the same first token.
*Reading the weights*: the time in which XLA sums as many bytes as a step reads, over the time of a token. *In codes*:
the same model compressed with one codec, one text at a time. Peers: ``transformers``, CTranslate2 and, in a process of
its own, OpenVINO GenAI: of this interpreter or of that which ``CAPIBARA_OPENVINO_PYTHON`` names.
Needs ``transformers`` and ``torch``; other peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run"]

PROMPT, WRITTEN, LENGTH, VOCABULARY = 64, 64, 256, 16384
CODECS = ("int8", "int4", "nf4")
Write = Callable[[list[list[int]]], list[list[int]]]


def make_model(folder: Path, dtype: str = "float32") -> None:
    """Write the model, and a tokenizer that no side uses, as transformers does."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = {("<unk>", "<s>", "</s>")[i] if i < 3 else f"t{i}": i for i in range(VOCABULARY)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)


def by_transformers(folder: Path) -> Write:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype="auto"
    ).eval()

    def write(prompts: list[list[int]]) -> list[list[int]]:
        given = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, given.shape[1] :].tolist()

    return write


def by_ctranslate2(folder: Path) -> Write:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    made = folder.parent / "ctranslate2"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(made))
    generator = ctranslate2.Generator(str(made), compute_type="float32", intra_threads=2, inter_threads=1)
    words = json.loads((made / "vocabulary.json").read_text(encoding="utf-8"))

    def write(prompts: list[list[int]]) -> list[list[int]]:
        found = generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=WRITTEN,
            min_length=WRITTEN,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [one.sequences_ids[0] for one in found]

    return write


@contextmanager
def by_openvino(python: str, folder: Path) -> Iterator[Write]:
    script = Path(__file__).with_name("_openvino.py")
    arguments = (folder, folder.parent / "openvino", WRITTEN, 2)
    command = [python, "-I", str(script), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        given, answers = process.stdin, process.stdout
        assert given is not None
        assert answers is not None

        def answer() -> str:
            if not (line := answers.readline()):
                raise RuntimeError("OpenVINO GenAI failed; its error is above")
            return line

        def write(prompts: list[list[int]]) -> list[list[int]]:
            print(json.dumps(prompts), file=given, flush=True)
            return json.loads(answer())

        assert answer() == "ready\n"
        yield write
        given.close()


def by_engine(source: Path, batch: int) -> Write:
    from capibara.cli._models import load_source
    from capibara.serve import Engine
    from capibara.serve.requests import Request
    from capibara.serve.sampling import Sampling

    loaded = load_source(str(source), quiet=True, decode="auto")
    engine = Engine(
        loaded.model,
        loaded.params,
        state=loaded.state,
        max_batch=batch,
        max_length=LENGTH,
        prefill_tokens=batch * PROMPT,  # all prompts in one step, as the peers read them
        prefill_chunks=batch,
    )

    def write(prompts: list[list[int]]) -> list[list[int]]:
        options: dict[str, Any] = {"max_tokens": WRITTEN, "ignore_eos": True}
        streams = [
            engine.submit(Request(tuple(prompt), sampling=Sampling(temperature=0.0), **options))
            for prompt in prompts
        ]
        return [[token for piece in stream for token in piece.tokens] for stream in streams]

    return write


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Rows of ratios: above 1 Capibara is the faster."""
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "torch")):
        print("transformers and torch are not both installed: the rows are left out")
        return []
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as made:
        rows = []
        for dtype in ("float32", "bfloat16"):
            folder = Path(made) / dtype / "llama"
            make_model(folder, dtype)
            rows += _against_peers(folder, dtype, rounds)
        return [*rows, *_against_memory(Path(made) / "float32" / "llama", rounds)]


def _prompts(batch: int, seed: int, length: int = PROMPT) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, (batch, length)).tolist()


def _against_peers(folder: Path, dtype: str, rounds: int) -> list[dict[str, Any]]:
    peers = {"transformers": by_transformers(folder)}
    if importlib.util.find_spec("ctranslate2") is not None:
        peers["ctranslate2"] = by_ctranslate2(folder)
    here = sys.executable if importlib.util.find_spec("openvino_genai") is not None else None
    with ExitStack() as started:
        if python := os.environ.get("CAPIBARA_OPENVINO_PYTHON") or here:
            peers["openvino-genai"] = started.enter_context(by_openvino(python, folder))
        return [row for batch in (1, 8) for row in _at_once(folder, dtype, peers, batch, rounds)]


def _at_once(
    folder: Path, dtype: str, peers: dict[str, Write], batch: int, rounds: int
) -> list[dict[str, Any]]:
    """Rows of one batch size."""
    from capibara.measure import interleaved

    ours = by_engine(folder, batch)
    prompts = _prompts(batch, 0)
    want = ours(prompts)
    texts = {name: np.asarray(write(prompts)) for name, write in peers.items()}
    same = {name: float(np.mean(text == np.asarray(want))) for name, text in texts.items()}
    if dtype == "float32":
        assert min(same.values()) > 0.9, same  # where two logits are equal but for rounding, texts part
    else:  # sides round to it at other places, and texts part sooner
        assert all((text[:, 0] == np.asarray(want)[:, 0]).all() for text in texts.values()), same
    # New prompts each time: nothing of them is known.
    seeds = iter(range(1, 1 << 20))
    table = interleaved(
        {
            name: lambda write=write, batch=batch, seeds=seeds: write(_prompts(batch, next(seeds)))
            for name, write in {"capibara": ours, **peers}.items()
        },
        rounds,
        1,
    )
    print(table)
    return [
        {
            "what": f"{batch} text{'s' if batch > 1 else ''} at once",
            "shape": f"{PROMPT} + {WRITTEN} tokens, Llama 101 M, {dtype}",
            "peer": name,
            "ratio": table.ratio(name, "capibara"),
            "ours_tokens_per_s": batch * WRITTEN / table["capibara"].median,
            "peer_tokens_per_s": batch * WRITTEN / table[name].median,
            "same_tokens": same[name],
        }
        for name in peers
    ]


def _against_memory(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One text at a time: against reading the weights once, and in codes against float32."""
    import jax
    import jax.numpy as jnp

    from capibara.compress import CompressionProfile, ModelCompressionAPI
    from capibara.core import ModularCapibaraModel
    from capibara.measure import interleaved

    model = ModularCapibaraModel.from_pretrained(folder)
    sizes = jax.tree.map(lambda x: x.size, model.params)
    read = sum(jax.tree.leaves(sizes)) - sizes["embedding"]["weight"]  # of the table one row is read
    numbers = jnp.ones((read,), jnp.float32)
    add = jax.jit(jnp.sum)
    prompt = _prompts(1, 0, 1)
    sides = {"float32": by_engine(folder, 1)}
    for codec in CODECS:
        archive = folder.parent / f"{codec}.capi"
        ModelCompressionAPI(CompressionProfile(strategy=codec)).compress(model, decode="auto").save(archive)
        model.config.to_toml(folder.parent / "config.toml")
        sides[codec] = by_engine(archive, 1)
    table = interleaved(
        {
            "reading": lambda: [add(numbers).block_until_ready() for _ in range(8)],
            **{name: lambda write=write: write(prompt) for name, write in sides.items()},
        },
        rounds,
        1,
    )
    print(table)
    token = {name: table[name].median / WRITTEN for name in sides}
    found: list[dict[str, Any]] = [
        {
            "what": "a token of one text",
            "shape": f"{4 * read / 1e6:.0f} MB of weights, float32",
            "peer": "reading the weights (XLA sums them)",
            "ratio": table["reading"].median / 8 / token["float32"],
            "ours_ms": 1e3 * token["float32"],
            "gigabytes_per_s": 4e-9 * read / token["float32"],
        }
    ]
    found += [
        {
            "what": f"a token of one text, weights in {codec}",
            "shape": "Llama 101 M",
            "peer": "Capibara, float32",
            "ratio": token["float32"] / token[codec],
            "ours_ms": 1e3 * token[codec],
        }
        for codec in CODECS
    ]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    for one in run(parser.parse_args().rounds):
        print(one)
