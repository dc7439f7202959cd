"""``capibara serve``: a model as an HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._bundles import (
    add_bundle_arguments,
    compile_bundle,
    devices_wanted,
    is_bytes,
    say_compiled,
    serving_mesh,
)
from capibara.cli._models import check_archive, load_source, warn_on_stderr
from capibara.lazy import trace_later

if TYPE_CHECKING:
    from capibara.serve import AdapterRoom
    from capibara.serve.engine.bundle import ProgramBundle
    from capibara.serve.engine.early import EarlyPrograms
    from capibara.serve.http.base import ServerSettings
    from capibara.serve.http.embeddings import EmbeddingService
    from capibara.serve.loaded import LoadedModel
    from capibara.serve.requests import EngineProtocol

_SWITCH_S = 5e-4  # by default Python has 5e-3
_LAST_WORDS_S = 5  # for sending what was written when a drain ends
_FORCED_S = 0.2  # likewise, after a second signal

HELP = """Serve a model over HTTP, with the API of OpenAI: /v1/completions, /v1/chat/completions, /v1/responses (of a
model that makes vectors: /v1/embeddings), /v1/models, /tokenize, /detokenize, /health and /metrics. MODEL is the folder
of a published model (Hugging Face), a GGUF file, the folder of a run, or a .capi file that carries its settings.
SIGTERM or Ctrl-C: what runs is finished first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("model", metavar="MODEL", help="the model to serve")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    parser.add_argument("--name", help="what clients call the model (default: the last part of MODEL)")
    parser.add_argument("--max-batch", type=int, metavar="N", help="texts at once (default: 16)")
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a prompt and its answer")
    parser.add_argument("--max-waiting", type=int, default=1024, metavar="N", help="requests that may wait")
    parser.add_argument(
        "--max-waiting-tokens", type=int, default=1 << 20, metavar="N", help="tokens of requests that wait"
    )
    parser.add_argument(
        "--max-wait",
        type=float,
        metavar="S",
        help="refuse requests that would wait longer for their turn (default: any time)",
    )
    parser.add_argument(
        "--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request (default: 4 MiB)"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds after which a text is ended")
    parser.add_argument(
        "--drain",
        type=int,
        default=30,
        metavar="S",
        help="seconds for what runs, once it is to end (default: 30)",
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        help="one key a line; requests need one (also: CAPIBARA_API_KEYS, with commas)",
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        help="what requests may have in Host besides localhost and loopback addresses, with commas: example.com, "
        "*.example.com; *: anything (default: nothing else where only this machine can ask and no key is needed, "
        "otherwise anything)",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a smaller model of the same vocabulary, which guesses the next tokens",
    )
    parser.add_argument(
        "--guess",
        type=int,
        metavar="N",
        help="look at so many guessed tokens in a step: of --draft-model (default: 4), otherwise what followed the "
        "same tokens earlier in the text (default: none)",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a low-rank adapter (PEFT), which clients ask for by its name; may be given several times",
    )
    parser.add_argument(
        "--adapter-rank",
        type=int,
        metavar="N",
        help="largest rank of adapters (default: of those given, or 16)",
    )
    parser.add_argument(
        "--load-adapters",
        action="store_true",
        help="let clients load adapters from folders of this machine, and unload them",
    )
    add_bundle_arguments(parser)
    parser.add_argument("--no-page", action="store_true", help="no page for the browser at /")
    parser.add_argument(
        "--decode",
        action="store_true",
        help="decode the quantized weights of an archive at the start; by default they stay in their codes",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0."""
    with contextlib.ExitStack() as starting:
        starting.enter_context(_undisturbed())
        return _run(args, starting.close)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Python's garbage collection and switch interval as a start needs them, and as they were afterwards."""
    # What a start makes is kept: looking through it for garbage again and again takes a tenth of its time.
    collects, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    # A thread that has read from a file, as loading does hundreds of times, waits this long for one that imports.
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)


def _run(args: argparse.Namespace, started: Callable[[], object]) -> int:
    from capibara.compilation.persistent_cache import keep_compiled
    from capibara.errors import ConfigError, MissingExtraError
    from capibara.jax_versions import find_package

    if args.tensor_parallel is not None and args.tensor_parallel < 1:
        raise ConfigError(f"--tensor-parallel: got {args.tensor_parallel}, expected devices from 1")
    if args.compile_for is not None:
        return compile_bundle(args)
    if args.output is not None:
        raise ConfigError("--output goes with --compile-for. Leave it out")

    if find_package("uvicorn") is None:
        raise MissingExtraError("uvicorn", "serve", "capibara serve")
    from capibara.serve.http.keys import Keys
    from capibara.serve.http.names import host_names, is_loopback

    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port: got {args.port}, expected 0 to 65535")
    for name in ("max_body", "drain"):
        if getattr(args, name) < 0:
            raise ConfigError(
                f"--{name.replace('_', '-')}: got {getattr(args, name)}, expected a number from 0"
            )
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError(f"--timeout: got {args.timeout:g}, expected seconds above 0")
    if args.max_wait is not None and not args.max_wait > 0:
        raise ConfigError(f"--max-wait: got {args.max_wait:g}, expected seconds above 0")
    check_archive(args.model)
    given = _keys(args.api_keys)
    keys = Keys(given)
    named = None if args.allowed_hosts is None else host_names(args.allowed_hosts.split(","))
    # Before the model is loaded: a port that is taken should not cost minutes.
    listener = _listen(args.host, args.port)
    # Pages of other sites must not reach, through this machine's browser, what everybody on this machine may ask.
    reachable = given or not is_loopback(listener.getsockname()[0])
    hosts = named if named is not None else None if reachable else host_names([args.host])
    with listener, contextlib.ExitStack() as kept:
        kept.enter_context(keep_compiled(lambda why: print(why, file=sys.stderr), min_seconds=0.0))
        bundle = _bundle(args)
        mesh = serving_mesh(devices_wanted(args), None if bundle is None else dict(bundle.mesh))
        loading = kept.enter_context(contextlib.ExitStack())
        early = _early(args) if bundle is None and mesh is None else None
        if early is not None:
            kept.callback(early.take)  # a process that ends while XLA compiles is aborted
            from capibara.native.rooms import reuse_rooms

            # Weights are read to where the engine will use them, instead of through JAX.
            loading.enter_context(reuse_rooms())
        # The largest imports, which the checks above do without, run beside other work: on a CPU while XLA loads
        # programs of earlier starts, elsewhere while weights are read.
        read = threading.Event()
        importing = threading.Thread(
            target=_import_server,
            args=(read.wait if early is None else early.wait_for_xla,),
            name="capibara-imports",
            daemon=True,
        )
        importing.start()
        if not _on_cpu():
            read.set()
        loaded = load_source(
            args.model,
            quiet=args.quiet,
            decode=_decode(args),
            mesh=mesh,
            packing=None if early is None else early.packing,
        )
        published = loaded.model.pretrained is not None
        if published and not loaded.model.tokenizer_files and not is_bytes(loaded.model):
            warn_on_stderr(
                f"{args.model!r} has no tokenizer.json: texts are read and written as bytes, which are few of the "
                f"model's {loaded.model.config.model.vocab_size} token ids"
            )
        read.set()
        served = _served(args, loaded, bundle, early)
        del loaded  # its weights are the engine's now
        importing.join()
        import uvicorn

        from capibara.serve.http import ServerSettings

        settings = ServerSettings(
            keys,
            args.max_body,
            args.timeout,
            page=not args.no_page,
            load_adapters=args.load_adapters,
            hosts=hosts,
        )
        app = _application(served, settings)
        loading.close()
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=args.drain + _LAST_WORDS_S,
            server_header=False,
            lifespan="off",  # it would close what is served, which is done below
        )
        server = _server(config, served, args.drain)

        def end(*_: object) -> None:
            server.should_exit = True

        gc.freeze()
        started()
        try:
            listener.listen(2048)  # who asks from now on is answered
        except OSError as error:  # another process was faster
            raise _not_free(args.host, args.port, error) from None
        host, port = listener.getsockname()[:2]
        # Uvicorn listens to signals once it runs, and sends itself the one that ended it once more when all is done.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        print(f"serving {served.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        server.run(sockets=[listener])
        served.close()
    return 0


def _server(config: Any, served: EngineProtocol | EmbeddingService, drain_s: float) -> Any:
    """Uvicorn's server, whose answers end before it gives up waiting for them."""
    import asyncio

    import uvicorn

    from capibara.serve.http import EmbeddingService

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if isinstance(served, EmbeddingService):
                await super().shutdown(sockets)
                return
            # What takes longer is ended by the engine, so that clients get what was written until then.
            ending = asyncio.create_task(asyncio.to_thread(served.close, drain_s=drain_s))
            await super().shutdown(sockets)
            if self.force_exit:  # by a second signal
                await asyncio.to_thread(served.close)
                await asyncio.sleep(_FORCED_S)
            await ending

    return Server(config)


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def _import_server(begin: Callable[[], object]) -> None:
    begin()
    with contextlib.suppress(ImportError):  # which is said where it is needed
        import uvicorn  # noqa: F401

        from capibara.serve.http.importing import import_fastapi

        import_fastapi()
        from capibara.serve.http import create_app  # noqa: F401


def _bundle(args: argparse.Namespace) -> ProgramBundle | None:
    """The programs that were compiled before, if any."""
    from capibara.errors import ConfigError

    if args.bundle is None:
        return None
    from capibara.serve.engine.bundle import ProgramBundle

    bundle = ProgramBundle.read(args.bundle)
    sizes = bundle.sizes
    for name, value, own in (
        ("max-batch", args.max_batch, sizes.max_batch),
        ("max-length", args.max_length, sizes.max_length),
        ("pages", args.pages, sizes.pages - 1),
        ("cache-dtype", args.cache_dtype, sizes.cache_dtype),
        ("tensor-parallel", args.tensor_parallel, bundle.mesh.get("model", 1)),
    ):
        if value not in (None, own):
            raise ConfigError(
                f"--{name} {value}: the bundle's programs are for {own}. Leave it out, or compile for {value}"
            )
    args.max_batch = sizes.max_batch
    if args.guess is None and sizes.guesses:
        args.guess = sizes.guesses
    return bundle


def _early(args: argparse.Namespace) -> EarlyPrograms | None:
    """The first programs, made while the weights are read, where that can be: of plain models on a CPU."""
    if args.adapter or args.load_adapters or args.draft_model is not None or not _on_cpu():
        return None
    trace_later()  # an earlier start may have left all that is needed
    from capibara.cli._models import find_config, is_archive
    from capibara.serve.engine.early import EarlyPrograms

    given: dict[str, Any] = {"max_length": args.max_length, "pages": args.pages}
    if is_archive(args.model):
        from capibara.serve.weights import describe_compressed

        config, tokenizer, given["describe"] = describe_compressed(args.model, decode=_decode(args))
    else:
        config, tokenizer = find_config(args.model)
    if config.tpu.enabled or not config.model.causal:
        from capibara import ops

        ops.import_all()
        return None
    given["max_batch"] = 16 if args.max_batch is None else args.max_batch
    return EarlyPrograms(config, tokenizer, cache_dtype=args.cache_dtype, guesses=args.guess or 0, **given)


def _decode(args: argparse.Namespace) -> bool | str:
    """What to do with codes of an archive."""
    return True if args.decode else "auto"


def _application(served: EngineProtocol | EmbeddingService, settings: ServerSettings) -> Any:
    """The application of what answers."""
    from capibara.serve.http import EmbeddingService, create_app, create_embedding_app

    if isinstance(served, EmbeddingService):
        return create_embedding_app(served, settings)
    return create_app(served, settings)


def _served(
    args: argparse.Namespace,
    loaded: LoadedModel,
    bundle: ProgramBundle | None = None,
    early: EarlyPrograms | None = None,
) -> EngineProtocol | EmbeddingService:
    """What answers: for a model that writes texts, or for one that makes vectors."""
    from capibara.errors import ConfigError

    # The name of a folder may have bytes that are no text.
    name = (
        (args.name or Path(args.model).absolute().name)
        .encode(errors="surrogateescape")
        .decode(errors="replace")
    )
    waiting = {"max_waiting": args.max_waiting, "max_waiting_tokens": args.max_waiting_tokens}
    if not loaded.model.config.model.causal:
        options = (
            "bundle",
            "cache_dtype",
            "pages",
            "guess",
            "max_wait",
            "max_batch",
            "timeout",
            "draft_model",
        )
        for option in (*options, "adapter", "adapter_rank", "load_adapters"):
            if getattr(args, option) not in (None, [], False):
                raise ConfigError(
                    f"--{option.replace('_', '-')}: is of models that write texts, and {args.model!r} makes vectors. "
                    "Leave it out"
                )
        from capibara.serve import Embedder
        from capibara.serve.http import EmbeddingService

        embedder = Embedder.of(loaded.model, loaded.params, max_length=args.max_length)
        return EmbeddingService(embedder, name=name, **waiting)
    from capibara.serve.engine import Engine

    speculation = None
    if args.draft_model is not None or args.guess is not None:
        mesh = loaded.model.mesh
        draft = (
            None if args.draft_model is None else load_source(args.draft_model, quiet=args.quiet, mesh=mesh)
        )
        given = {} if draft is None else {"draft": draft.model, "params": draft.params, "state": draft.state}
        from capibara.serve import Speculation

        speculation = Speculation(4 if args.guess is None else args.guess, **given)
    named, room = _adapters(args, loaded.model)
    engine = Engine(
        loaded.model,
        loaded.params,
        state=loaded.state,
        donate_params=True,
        name=name,
        max_batch=16 if args.max_batch is None else args.max_batch,
        max_length=args.max_length,
        pages=args.pages,
        cache_dtype=args.cache_dtype,
        bundle=bundle,
        early=early,
        untraced=True,
        speculation=speculation,
        adapters=room,
        max_wait_s=args.max_wait,
        warm="first",
        progress=None if args.quiet else say_compiled,
        **waiting,
    )
    for name, folder in named.items():
        engine.load_adapter(name, folder)
    return engine


def _adapters(args: argparse.Namespace, model: Any) -> tuple[dict[str, str], AdapterRoom | None]:
    """The adapters that are given, and the room that they and later ones need."""
    from capibara.errors import ConfigError
    from capibara.serve import AdapterRoom

    named: dict[str, str] = {}
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in named:
            raise ConfigError(f"--adapter {text!r:.200}: expected NAME=FOLDER, each name once")
        named[name] = folder
    if not named and not args.load_adapters:
        return {}, None
    ranks = [16] if not named else []
    if named and model.pretrained is not None:
        from capibara.families.peft import adapter_settings

        ranks = [adapter_settings(f, model.pretrained.family)["finetune.rank"] for f in named.values()]
    return named, AdapterRoom(args.adapter_rank or max(ranks, default=16))


def _keys(path: str | None) -> list[str]:
    import os

    from capibara.errors import ConfigError

    found = [key.strip() for key in os.environ.get("CAPIBARA_API_KEYS", "").split(",")]
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-keys: {path!r} cannot be read: {error}") from None
        found += [line.strip() for line in text.splitlines()]
        if not any(found):
            raise ConfigError(f"--api-keys: {path!r} has no keys. Write one a line, or leave the option out")
    return [key for key in found if key]


def _listen(host: str, port: int) -> Any:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _not_free(host, port, error) from None
    return listener


def _not_free(host: str, port: int, error: OSError) -> Exception:
    from capibara.errors import ConfigError

    remedy = "Choose another port, or 0 for any that is free"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "Name an address of this machine, such as 127.0.0.1, ::1 or 0.0.0.0"
    return ConfigError(f"--host {host} --port {port}: {error.strerror or error}. {remedy}")
