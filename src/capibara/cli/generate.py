"""``capibara generate``: text from a checkpoint, streamed as it is written."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.cli._models import load_source, warn_on_stderr

if TYPE_CHECKING:
    import numpy as np

    from capibara.data import Tokenizer
    from capibara.serve.generate import Generator
    from capibara.serve.loaded import LoadedModel
    from capibara.serve.sampling import Sampling

HELP = """Write text with a trained model: the newest complete checkpoint of the run that --config or
--checkpoint names, the published model that --model names, or the compressed parameters that --weights
names. Defaults come from the [generate] settings of the configuration. Once a text exceeds the model's
max_sequence_length, the model reads the last half window again and continues from there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", help="use the run of this TOML file or packaged name (default: demo)")
    where.add_argument("--checkpoint", metavar="DIR", help="folder of a run, or of one checkpoint")
    where.add_argument(
        "--model", metavar="MODEL", help="folder of a published model (Hugging Face), or a GGUF file"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="a .capi file with the model's parameters; settings are those of --config, --checkpoint or --model, those "
        "that the file carries (capibara compress MODEL FILE.capi), or the config.toml in the same folder",
    )
    parser.add_argument(
        "--quantized",
        action="store_true",
        help="with --weights: multiply by 8-bit and 4-bit parameters without decoding them, so that they take as "
        "much memory as the file",
    )
    parser.add_argument("--prompt", help="start of the text; with --chat: the message")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="talk to a model with a chat template: answer --prompt, or else each line of standard input",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: instructions before the conversation")
    parser.add_argument(
        "--length",
        "--max-tokens",
        dest="max_tokens",
        type=int,
        metavar="N",
        help="tokens to generate at most (bytes, if the model has no tokenizer)",
    )
    parser.add_argument(
        "--temperature", type=float, help="0: always the likeliest token; 1: the model's probabilities"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens with total probability P; 1: all",
    )
    parser.add_argument("--seed", type=int, help="random seed; the same seed gives the same text")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming"
    )


def _settings(args: argparse.Namespace) -> tuple[Any, Any]:
    """The settings of the model, and the checkpoint, or ``None`` where only ``--weights`` says what to read."""
    from capibara.config import ModularModelConfig
    from capibara.serve.load import find_checkpoint
    from capibara.serve.weights import weights_config

    if args.checkpoint is not None:
        checkpoint = find_checkpoint(args.checkpoint, warn=warn_on_stderr)
        return ModularModelConfig.from_toml(checkpoint.config_path), checkpoint
    if args.weights is not None and args.config is None:
        return _readable(lambda: weights_config(args.weights)), None
    if args.weights is not None:
        return ModularModelConfig.from_toml(args.config), None
    config = ModularModelConfig.from_toml("demo" if args.config is None else args.config)
    return config, find_checkpoint(config.checkpoint.directory, warn=warn_on_stderr)


def run(args: argparse.Namespace) -> int:
    """Generate; return 0."""
    from capibara.compilation.persistent_cache import keep_compiled

    with keep_compiled(lambda why: print(why, file=sys.stderr)):
        return _generate(args)


def _generate(args: argparse.Namespace) -> int:
    from capibara.core.encoders import require_decoder
    from capibara.errors import ConfigError
    from capibara.serve.sampling import Sampling

    if args.quantized and args.weights is None:
        raise ConfigError("--quantized: a checkpoint has no codes. Remedy: --weights FILE.capi.")
    if args.system is not None and not args.chat:
        raise ConfigError("--system is for conversations. Remedy: --chat.")
    if args.json and args.chat and args.prompt is None:
        raise ConfigError("--json answers one message. Remedy: --prompt.")
    if args.model is None:
        config, checkpoint = _settings(args)
    else:
        from capibara.families import read_config

        config, checkpoint = read_config(args.model)[0], None

    require_decoder(config.model, "generating text")

    def chosen(name: str) -> Any:
        given = getattr(args, name)
        return getattr(config.generate, name) if given is None else given

    # Checked before the model is loaded: a typo should not cost seconds.
    sampling = Sampling(chosen("temperature"), chosen("top_k"), chosen("top_p"))
    writer = _Writer(_load(args, config, checkpoint), sampling, chosen("max_tokens"), chosen("seed"))
    if args.chat and args.prompt is None:
        return _converse(writer, args.system)
    prompt = "" if args.prompt is None else args.prompt
    if args.chat:
        tokens = writer.of_messages([*_system(args.system), {"role": "user", "content": _clean(prompt)}])
    else:
        tokens = writer.tokenizer.encode(prompt)
    if not args.json:
        if not args.chat:
            _write(_clean(prompt))
        writer.stream(tokens)
        return 0
    begun = time.perf_counter()
    generated = list(writer.tokens(tokens))
    seconds = time.perf_counter() - begun
    result = {
        "prompt": _clean(prompt),
        "text": "".join(writer.decode(generated)),
        "tokens": len(generated),
        "finish": "length" if len(generated) == writer.max_tokens else "stop",
        "seconds": seconds,
        "checkpoint": None if checkpoint is None else str(checkpoint.path),
        "step": None if checkpoint is None else checkpoint.step,
        "model": args.model,
        "weights": args.weights,
        "quantized": args.quantized,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": chosen("seed"),
    }
    print_json(result)
    return 0


def _readable(load: Callable[[], Any]) -> Any:
    """What ``load`` gives; errors of the operating system name the argument."""
    from capibara.cli._archives import reason
    from capibara.errors import ConfigError

    try:
        return load()
    except OSError as error:
        raise ConfigError(f"--weights: {reason(error)}. Remedy: a .capi file that can be read.") from None


def _load(args: argparse.Namespace, config: Any, checkpoint: Any) -> LoadedModel:
    from jax.tree_util import tree_leaves

    from capibara.compress.coded import is_coded
    from capibara.errors import ConfigError
    from capibara.serve.load import load_model
    from capibara.serve.weights import load_compressed

    if args.model is not None and args.weights is None:
        return load_source(args.model, quiet=args.json)
    if args.weights is None:
        return load_model(checkpoint)
    decode = "auto" if args.quantized else True
    loaded = _readable(
        lambda: load_compressed(
            args.weights, config, checkpoint=checkpoint, published=args.model, decode=decode
        )
    )
    if args.quantized and not any(map(is_coded, tree_leaves(loaded.params, is_leaf=is_coded))):
        raise ConfigError(
            f"--quantized: no parameter of {args.weights} is stored with int8, int4 or nf4. Remedy: leave it out, "
            "or compress the model with one of these strategies."
        )
    return loaded


# A cache for fewer positions would not save time.
_LEAST_PLACES = 256


class _Writer:
    """A model that continues texts, with one kind of sampling."""

    def __init__(self, loaded: LoadedModel, sampling: Sampling, max_tokens: int, seed: int) -> None:
        self.loaded, self.sampling = loaded, sampling
        self.max_tokens, self.seed = max_tokens, seed
        self.tokenizer: Tokenizer = loaded.model.tokenizer
        self._generator: Generator | None = None

    def tokens(self, prompt: np.ndarray) -> Iterator[int]:
        """The token ids that continue a prompt."""
        generator = self._for(len(prompt) + self.max_tokens)
        stop = self.tokenizer.stop_tokens
        return generator.tokens(prompt, max_tokens=self.max_tokens, seed=self.seed, stop=stop)

    def of_messages(self, messages: list[dict[str, str]]) -> np.ndarray:
        """The prompt that asks for the next message."""
        return self.tokenizer.encode(self.tokenizer.chat(messages), special=False)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens, in whole characters."""
        from capibara.data import decode_stream

        return decode_stream(self.tokenizer, tokens)

    def stream(self, prompt: np.ndarray) -> str:
        """Write what continues a prompt to standard output, as it is generated, and return it."""
        pieces = []
        for piece in self.decode(self.tokens(prompt)):
            pieces.append(piece)
            _write(piece)
        _write("\n")
        return "".join(pieces)

    def _for(self, length: int) -> Generator:
        """A generator with a cache for ``length`` tokens; that of the longest texts may not fit into memory."""
        from capibara.serve.generate import Generator

        most = self.loaded.model.config.model.max_sequence_length
        places = min(most, max(_LEAST_PLACES, 1 << (max(length, 1) - 1).bit_length()))
        if self._generator is None or self._generator.places < places:
            self._generator = None  # its weights may be held twice
            self._generator = Generator(
                self.loaded.model,
                self.loaded.params,
                state=self.loaded.state,
                sampling=self.sampling,
                vocabulary=self.tokenizer.vocab_size,
                tokenizer=self.tokenizer,
                places=places,
            )
        return self._generator


def _converse(writer: _Writer, system: str | None) -> int:
    """Answer each line of standard input; end with the input."""
    messages = _system(system)
    asked = sys.stdin.isatty()
    while True:
        if asked:
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": _clean(line.rstrip("\n"))})
        answer = writer.stream(writer.of_messages(messages))
        messages.append({"role": "assistant", "content": answer})


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": _clean(text)}]


def _clean(text: str) -> str:
    """A lone surrogate stands for a byte of the command line that was not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
