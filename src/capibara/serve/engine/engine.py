"""The engine: many texts written at once by one model.

One thread runs steps. Each step takes one token of every text that is being written and pieces of the prompts of those
that are not read yet, in one program of one of a few shapes, all compiled at the start. Texts come and go between
steps. Keys and values lie in pages that are shared by texts with the same beginning; when there are none left, the text
of the lowest priority that came last gives its own back, and is read again later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING, Any, Literal, Self

import jax
import numpy as np

from capibara.core.paged import StepShape
from capibara.data import ByteTokenizer, Tokenizer
from capibara.errors import ConfigError
from capibara.memory.large_pages import ask_for_large_pages, spans_of
from capibara.serve.engine.adapters import AdapterRoom, Adapters
from capibara.serve.engine.choosing import Asked, Choice, choose_tokens, start_choice
from capibara.serve.engine.early import EarlyPrograms
from capibara.serve.engine.layers import as_computed, layers_apart, room_for_panels
from capibara.serve.engine.limits import check_request, is_integer
from capibara.serve.engine.pages import PagePool
from capibara.serve.engine.programs import Programs, kept_programs, pages_in_memory, run_each
from capibara.serve.engine.sequences import Sequence
from capibara.serve.engine.several import StepTimes
from capibara.serve.engine.speculation import (
    DraftModel,
    Earlier,
    Speculation,
    check_speculation,
    shares_arrays,
)
from capibara.serve.engine.steps import EngineSizes, StartedStep, StepPiece
from capibara.serve.engine.streams import PieceStream, StoppingText
from capibara.serve.engine.turns import Turns
from capibara.serve.requests import (
    EngineClosedError,
    EngineStatistics,
    Piece,
    QueueFullError,
    Request,
    RequestError,
    TokenScore,
)

if TYPE_CHECKING:
    from capibara.serve.engine.bundle import ProgramBundle

__all__ = ["Engine"]


_GIVE_WAY_S = 0.25  # for texts that are written, before a program is compiled beside them
_START_S = 0.5  # for what follows an engine's start, and for who waited for it, likewise


def _on_device(model: Any, params: Any) -> Any:
    """The parameters, those of NumPy as arrays of JAX: each step would take them to the device again."""
    if model.mesh is not None:
        return params
    return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, params)


class Engine:
    """Writes texts for many requests at once: see :class:`capibara.serve.requests.EngineProtocol`.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel`, a decoder.
      params: its parameters, some of which may be quantized; by default the model's own. state: likewise.
      donate_params: whether the engine may delete the parameters that it copies, including a draft model's. The models
        cannot be used elsewhere afterwards, even if this call raises an error. On a single CPU device, the engine packs
        matrices into panels, for faster products of a few rows. Without donation both are kept in memory, and nothing
        is packed if the copies would take more than half of the free memory. With a bundle it always packs.
      tokenizer: by default the model's own. name: what clients call the model.
      max_batch: texts that are written at once.
      max_length: most tokens of a prompt and its answer; by default, and at most, ``model.max_sequence_length``.
      page_size: positions of a page. pages: how many; by default as many as ``max_batch`` texts of ``max_length`` need,
        or half of the memory that is free holds.
      prefill_tokens: tokens of prompts that a step reads at most. prefill_chunks: in how many pieces.
      prefix_cache: whether texts with the same beginning share pages; not for models with recurrent states.
      cache_dtype: of keys and values; by default that of the model's arithmetic, though a CPU computes a model of
        bfloat16 in float32. ``"int8"``: codes with a scale for each head of a position, a quarter of float32; attention
        then goes through XLA.
      use_cache: keep the keys, values and states of earlier tokens; otherwise every token is computed from the whole
        text before it, to compare with.
      adapters: for which low-rank adapters there is room; by default for none.
      speculation: how tokens are guessed ahead; by default not at all.
      max_waiting, max_waiting_tokens: requests, and tokens of their prompts, that may wait.
      max_wait_s: seconds that a request may wait for its turn. One that would have to wait longer, as far as the texts
        before it tell, or longer than its own ``deadline_s``, is refused at once instead. ``None``: any time.
      warm: compile all programs now; ``"first"``: those that a plain request cannot do without now, and the others
        beside the steps that run; ``False``: each when it is needed first. If one of the others cannot be compiled, the
        engine takes no more requests.
      bundle: programs that were compiled before, on another machine perhaps (:func:`write_bundle`): all are read now,
        and nothing is compiled. Its sizes take the place of ``max_batch``, ``max_length``, ``page_size``, ``pages``,
        ``prefill_tokens``, ``prefill_chunks`` and ``cache_dtype``.
      early: programs that were made while the model was read; its pages and tokenizer are taken, too.
      untraced: on one CPU device, where compiled programs are kept (:func:`capibara.compilation.keep_compiled`), take
        those of earlier processes without tracing them again. A process that changes methods of the model or operations
        must not ask for it.
      progress: called with the number of programs compiled and of all. What it raises is raised here; beside the steps
        it is logged, and ``progress`` not called again.

    Raises:
      ConfigError: an argument is out of range, or the model is an encoder.
      PackedProgramError: the bundle does not fit the model, the devices or what is installed; the message says why.
    """

    def __init__(
        self,
        model: Any,
        params: Any | None = None,
        *,
        state: Any | None = None,
        donate_params: bool = False,
        tokenizer: Tokenizer | None = None,
        name: str = "capibara",
        max_batch: int = 16,
        max_length: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        prefill_tokens: int = 128,
        prefill_chunks: int = 4,
        prefix_cache: bool = True,
        cache_dtype: Any | None = None,
        use_cache: bool = True,
        adapters: AdapterRoom | None = None,
        speculation: Speculation | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1 << 20,
        max_wait_s: float | None = None,
        warm: bool | Literal["first"] = True,
        bundle: ProgramBundle | None = None,
        early: EarlyPrograms | None = None,
        untraced: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        sizes = EngineSizes.of(
            model,
            max_batch=max_batch,
            max_length=max_length,
            page_size=page_size,
            prefill_tokens=prefill_tokens,
            prefill_chunks=prefill_chunks,
            cache_dtype=cache_dtype,
            guesses=0 if speculation is None or not use_cache else speculation.tokens,
        )
        beside = warm == "first"
        if bundle is not None:
            bundle.check(model, sizes, adapters=adapters is not None)
            sizes, pages, warm = bundle.sizes, bundle.sizes.pages - 1, True
            max_batch, page_size = sizes.max_batch, sizes.page_size
            if speculation is not None and speculation.draft is not None:
                raise ConfigError("bundle: has no programs of a draft model. Leave speculation.draft out.")
        asked, cache_dtype = cache_dtype, sizes.cache_dtype
        for key, value, most in (
            ("pages", sizes.pages if pages is None else pages, 1 << 31),
            ("max_waiting", max_waiting, 1 << 30),
            ("max_waiting_tokens", max_waiting_tokens, 1 << 40),
        ):
            if not is_integer(value, 1, most):
                raise ConfigError(f"{key}={value!r}: expected an integer from 1 to {most}.")
        if max_wait_s is not None and not (isinstance(max_wait_s, int | float) and max_wait_s > 0):
            raise ConfigError(
                f"max_wait_s={max_wait_s!r:.50}: expected a number of seconds above 0, or None."
            )
        made = None if early is None else early.take()
        if made is not None:
            pages, tokenizer = made.sizes.pages - 1, made.tokenizer if tokenizer is None else tokenizer
        self._name = name
        self._tokenizer: Tokenizer = tokenizer or (
            model.tokenizer if hasattr(model, "tokenizer") else ByteTokenizer()
        )
        settings = model.config.model
        params = _on_device(model, model.params if params is None else params)
        state = model.state if state is None else state
        if bundle is not None:
            bundle.check_devices(model, (params, state))
        model = as_computed(model)
        if speculation is not None and use_cache:
            check_speculation(speculation, model, sizes.max_length)
            donate_params = donate_params and not shares_arrays(speculation, params)
        if made is not None and donate_params:
            panels = made.panels
        else:
            panels = bundle is not None or room_for_panels(model, params, donate=donate_params)
        how = {"panels": panels, "donate": donate_params}
        self._adapters = None if adapters is None else Adapters(model, params, adapters, **how)
        if self._adapters is not None:
            model, params = self._adapters.model, self._adapters.params
        self._model = model
        self._params = params if self._adapters is not None else layers_apart(model, params, **how)
        self._state = state
        self._max_length, self._max_batch = sizes.max_length, max_batch
        self._vocabulary = settings.vocab_size
        self._writable = min(self._vocabulary, self._tokenizer.vocab_size)
        self._use_cache = use_cache
        # Preparing what changes logits then takes the cores from a step beside it, which it slows down.
        self._host_computes = model.backend.platform == "cpu"
        count = 1 + (
            pages_in_memory(model, page_size, cache_dtype, least=sizes.table, most=sizes.pages - 1)
            if pages is None
            else pages
        )
        self._sizes = sizes = dataclasses.replace(sizes, pages=count)
        self._pool = PagePool(count, page_size, prefix=prefix_cache and use_cache and not sizes.recurrent)
        self._slots = list(range(max_batch, 0, -1))
        make = None if bundle is None else bundle.maker(model)
        kept = None
        if untraced and made is None and bundle is None:
            kept = kept_programs(model, self._params, self._state, writable=self._writable)
        self._programs = Programs(
            model, self._params, self._state, writable=self._writable, make=make, untraced=kept
        )
        cache = None
        if made is not None and made.sizes == sizes and self._programs.adopt(made.programs):
            cache = made.cache
        made = None  # there is no room for its pools and others
        self._cache = self._programs.empty_cache(sizes) if cache is None else cache
        del cache  # the first step uses it up
        # By address: a step uses the arrays of the cache up, and what it gives lies where they did.
        self._large = spans_of((self._params, self._cache))
        self._speculation = speculation if use_cache else None
        self._draft: DraftModel | None = None
        if self._speculation is not None and self._speculation.draft is not None:
            self._draft = DraftModel(
                self._speculation,
                count,
                page_size,
                sizes.slots,
                dtype=asked,
                writable=self._writable,
                donate=donate_params,
                untraced=untraced,
            )
            self._large |= spans_of((self._draft.params, self._draft.cache))
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._there = threading.Condition(self._lock)
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting_tokens = 0
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._max_wait_s, self._turns = max_wait_s, Turns()
        self._running: list[Sequence] = []
        self._turn = (0, False)
        # A text for which there were no pages, and how many were free.
        self._refused: tuple[Sequence, int] | None = None
        self._closing, self._closed, self._failed = False, False, ""
        self._progress_at = time.monotonic()
        self._times = StepTimes()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._finish_times: deque[float] = deque(maxlen=64)
        self._answered = threading.Event()  # a first step has given something, or the engine is closing
        self._warming: threading.Thread | None = None
        first, rest = self._to_compile() if warm else ([], [])
        if warm is True:
            first, rest = [*first, *rest], []
        self._programs_left, total = len(rest), len(first) + len(rest)
        for done, _ in enumerate(run_each(first, together=kept is not None), start=1):
            if progress is not None:
                progress(done, total)
        if not rest and not beside:
            self._use_large_pages()
        else:
            given = rest, len(first), total, progress
            self._warming = threading.Thread(
                target=self._warm, args=given, name="capibara-warm-up", daemon=True
            )
            self._warming.start()
        self._thread = threading.Thread(target=self._run, name="capibara-engine", daemon=True)
        self._thread.start()

    def _to_compile(self) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
        """What compiles each program: of the first plain requests, and the rest."""
        first, rest = self._programs.to_compile(
            self._sizes.every, self._cache, self._sizes.inputs, early=self._programs.early(self._sizes)
        )
        if self._draft is not None:
            # A draft model reads rows alone in any case.
            early = [self._sizes.plain[0], *self._sizes.early]
            more = self._draft.programs.to_compile(
                self._sizes.plain, self._draft.cache, self._sizes.inputs, early=early, apart=True
            )
            first, rest = first + more[0], rest + more[1]
        return first, rest

    def _use_large_pages(self) -> None:
        for start, length in self._large:
            if self._closing:
                return
            ask_for_large_pages(start, length, move=True)

    def _warm(
        self,
        rest: list[Callable[[], Any]],
        done: int,
        total: int,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        def make(compile_one: Callable[[], Any]) -> None:
            nonlocal done, progress
            try:
                compile_one()
            except Exception as error:
                if self._closing:
                    return
                # A step that needs it would fail, and end the texts of all.
                self._fail("a program cannot be compiled", error)
                return
            self._programs_left -= 1
            done += 1
            if progress is None:
                return
            try:
                progress(done, total)
            except Exception:
                logging.getLogger(__name__).exception("the progress of compiling cannot be shown")
                progress = None

        self._answered.wait(_START_S)
        # Until there is one of a row alone, each token of the first text takes as long as a part of a prompt.
        soon = 0 if self._is_ready(self._sizes.plain[0]) else 1
        for compile_one in rest[:soon]:
            if self._closing:
                return
            make(compile_one)
        with self._there:
            self._there.wait_for(lambda: self._closing, timeout=_START_S)
        if not self._gives_way():
            return
        self._use_large_pages()  # on some systems this takes seconds
        for compile_one in rest[soon:]:
            if not self._gives_way():
                return
            make(compile_one)

    def _gives_way(self) -> bool:
        """Wait a moment while there are requests; whether the engine still takes new ones.

        Tracing and steps take turns in Python: a first request should not wait for what it does not need.
        """
        with self._there:
            self._there.wait_for(
                lambda: self._closing or not (self._running or self._waiting), timeout=_GIVE_WAY_S
            )
            return not (self._closing or self._failed)

    def _every_program(self) -> list[Programs]:
        return [self._programs] if self._draft is None else [self._programs, self._draft.programs]

    # ---- what there is ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self._name

    @property
    def model(self) -> Any:
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._max_length

    def statistics(self) -> EngineStatistics:
        with self._lock:
            c = self._counts
            return EngineStatistics(
                running=len(self._running),
                waiting=len(self._waiting),
                waiting_tokens=self._waiting_tokens,
                pages_used=self._pool.used,
                pages_total=self._pool.total,
                prompt_tokens=c["prompt"],
                generated_tokens=c["generated"],
                cached_prompt_tokens=c["cached"],
                finished=dict(self._finished),
                preemptions=c["preemptions"],
                steps=c["steps"],
                compilations=sum(programs.compilations for programs in self._every_program()),
                guessed_tokens=c["guessed"],
                right_guesses=c["right"],
                programs_left=self._programs_left,
            )

    def stalled_s(self) -> float:
        """Seconds since a step finished, while there is something to do: see the protocol."""
        if self._failed or (not self._closed and not self._thread.is_alive()):
            return math.inf
        # Without the lock, which a step that hangs may hold.
        if not self._running and not self._waiting:
            return 0.0
        # A step that waits for a program is slow, but does not hang: another process would have to compile it, too.
        seen = max(self._progress_at, *(programs.waited_until() for programs in self._every_program()))
        return max(0.0, time.monotonic() - seen)

    def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return [] if self._adapters is None else self._adapters.names

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Read an adapter, a folder with PEFT's files; requests name it from then on.

        Raises:
          ConfigError: there is no room for it, or the name is taken. FamilyError: it is not one of this model.
        """
        if not name or name == self._name:
            raise ConfigError(f"adapter name {name!r:.100}: expected one that differs from the model's.")
        self._room_for_adapters().load(name, folder, self._programs.weights_of)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; texts that have begun with it go on.

        Raises:
          ConfigError: it is not loaded.
        """
        self._room_for_adapters().unload(name)

    def _room_for_adapters(self) -> Adapters:
        if self._adapters is None:
            raise ConfigError("adapters: the engine was started without room for any.")
        return self._adapters

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> PieceStream:
        """Queue a request; its text is read from the stream that is returned.

        Raises:
          RequestError: it cannot be answered. QueueFullError: too much waits. EngineClosedError: the engine takes no
            more requests: it is shutting down, a step has failed, or a program cannot be compiled.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Row[Request]) -> list[PieceStream]:
        """Queue all of some requests, or none; their texts are read from the streams that are returned.

        Raises:
          RequestError, QueueFullError, EngineClosedError: as :meth:`submit`.
        """
        count = len(requests)
        if count > self._max_waiting:
            raise RequestError(
                f"{count} texts are asked for at once, expected at most max_waiting={self._max_waiting}. Ask for fewer."
            )
        sequences = [self._sequence(request) for request in requests]
        length = sum(len(sequence.tokens) for sequence in sequences)
        with self._there:
            if self._closing or self._failed:
                raise EngineClosedError(self._failed or "the engine is shutting down")
            full = len(self._waiting) + count > self._max_waiting
            if full or self._waiting_tokens + length > max(self._max_waiting_tokens, length):
                raise QueueFullError(
                    f"{len(self._waiting)} requests with {self._waiting_tokens} tokens wait already (at most "
                    f"max_waiting={self._max_waiting} and max_waiting_tokens={self._max_waiting_tokens})",
                    self._until_room(),
                )
            self._check_wait(sequences)
            if not self._running and not self._waiting:
                self._progress_at = time.monotonic()
            for sequence in sequences:
                heapq.heappush(self._waiting, (sequence.order, sequence))
            self._waiting_tokens += length
            self._there.notify_all()
        return [sequence.stream for sequence in sequences]

    def full_for_s(self) -> float:
        """Seconds until a request may be taken: see the protocol."""
        # Without the lock, which the thread of the steps holds now and then: a request more or less does no harm.
        waiting = self._waiting[:]
        if len(waiting) >= self._max_waiting:
            return self._until_room()
        if self._max_wait_s is None:
            return 0.0
        # A request whose priority is not known yet may pass by all that are less urgent than the first.
        ahead = sum(order[0] == waiting[0][0][0] for order, _ in waiting)
        return max(0.0, self._wait_s(ahead) - self._max_wait_s)

    def _wait_s(self, ahead: int) -> float:
        """Seconds that a request waits for its turn, with so many before it."""
        running = len(self._running)
        # Free places go to those before it, which the next steps take in; without pages for the next, none is free.
        free = max(0, self._most_texts() - running) if self._has_pages() else 0
        return 0.0 if ahead < free else self._turns.wait_s(ahead - free, running + free)

    def _check_wait(self, sequences: list[Sequence]) -> None:
        """Refuse requests that would not have their turn in time."""
        for number, sequence in enumerate(sequences):
            limits = [x for x in (self._max_wait_s, sequence.request.deadline_s) if x is not None]
            if not limits:
                continue
            before = sum(order[0] <= sequence.request.priority for order, _ in self._waiting)
            wait = self._wait_s(before + number)
            if wait > min(limits):
                raise QueueFullError(
                    f"the request would wait about {wait:.1f} s for its turn, expected at most {min(limits):g} s "
                    "(max_wait_s or its deadline_s)",
                    wait - min(limits),
                )

    def _until_room(self) -> float:
        """Seconds after which a request is likely to have ended."""
        times = self._finish_times
        if len(times) < 2:
            return 1.0
        return float(np.clip((times[-1] - times[0]) / (len(times) - 1), 0.1, 60.0))

    def _sequence(self, request: Request) -> Sequence:
        tokens, most = check_request(
            request,
            max_length=self._max_length,
            capacity=self._pool.total * self._pool.page_size,
            vocabulary=self._vocabulary,
        )
        adapter = None
        if request.adapter:
            adapter = None if self._adapters is None else self._adapters.get(request.adapter)
            if adapter is None:
                raise RequestError(
                    f"adapter {request.adapter!r:.100} is not loaded; there are {self.adapters() or 'none'}."
                )
        grammar = None
        if request.grammar is not None:
            from capibara.serve.grammar import compile_grammar

            grammar = compile_grammar(request.grammar, self._tokenizer, self._vocabulary)
        ends = frozenset(request.stop_tokens)
        if not request.ignore_eos:
            ends |= self._tokenizer.stop_tokens
        sequence: Sequence
        stream = PieceStream(request, lambda: self._cancel(sequence))
        # What an adapter changes is shared by its own texts only.
        salt = hashlib.sha256(f"{adapter.number if adapter else 0} {request.salt}".encode()).digest()
        sequence = Sequence(
            request=request,
            stream=stream,
            number=next(self._numbers),
            tokens=tokens,
            most=most,
            seed=int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed,
            ends=ends,
            writer=StoppingText(self._tokenizer.stream(), request.stop),
            salt=salt,
            grammar=grammar,
            adapter=adapter,
        )
        return sequence

    def _cancel(self, sequence: Sequence) -> None:
        with self._there:
            sequence.cancelled = True
            self._there.notify_all()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, let those that there are go on for so many seconds, end the rest, free the cache."""
        end = time.monotonic() + drain_s
        with self._there:
            self._closing = True
            self._answered.set()
            self._there.notify_all()
            while (self._running or self._waiting) and self._thread.is_alive():
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._there.wait(min(left, 0.1))
            self._closed = True
            self._there.notify_all()
        self._thread.join(timeout=30)
        if self._warming is not None:
            self._warming.join(timeout=60)  # a process that ends while XLA compiles is aborted
        with self._lock:
            self._end_all("cancelled")
            if not self._thread.is_alive():  # a step that hangs still has it
                self._cache = None
                if self._draft is not None:
                    self._draft.cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._there:
                    self._drop()
                    while not self._running and not self._waiting and not self._closed:
                        self._there.wait()
                        self._drop()
                    if self._closed:
                        return
                    pieces = self._plan()
                if pieces:
                    self._advance(pieces)
                self._progress_at = time.monotonic()
        except BaseException as error:
            self._fail("a step of the engine failed", error, every=True)

    def _fail(self, what: str, error: BaseException, *, every: bool = False) -> None:
        """Take no more requests, and end the texts that cannot go on.

        Args:
          every: whether none can. Otherwise plain texts go on with the programs that there are, and what has begun.
        """
        message = f"{what}: {type(error).__name__}: {error!s:.500}"
        with self._there:
            self._failed = self._failed or message
            if every:
                self._end_all("error", message)
            else:
                waiting = [sequence for _, sequence in self._waiting if sequence.admitted is None]
                gone = [sequence for sequence in waiting if sequence.scoring or not sequence.is_plain]
                self._end_waiting(gone, lambda _: "error", message)
        # Without the lock: who writes it down may take long, or fail.
        logging.getLogger(__name__).error("%s", message)

    def _drop(self) -> None:
        """End what was cancelled, and what has no more time."""
        for sequence in list(self._running):
            if sequence.cancelled or sequence.expired:
                self._end(sequence, "cancelled" if sequence.cancelled else "length")
        gone = [s for _, s in self._waiting if s.cancelled or s.expired]
        self._end_waiting(gone, lambda s: "cancelled" if s.cancelled else "length")

    def _end_waiting(
        self, gone: list[Sequence], reason: Callable[[Sequence], Any], error: str | None = None
    ) -> None:
        """End some of those that wait."""
        if not gone:
            return
        self._waiting = [(order, s) for order, s in self._waiting if s not in gone]
        heapq.heapify(self._waiting)
        for sequence in gone:
            self._waiting_tokens -= len(sequence.request.prompt)
            self._ended(sequence, sequence.end(reason(sequence), error=error))

    def _plan(self) -> list[StepPiece]:
        """What the next step computes."""
        self._running.sort(key=lambda sequence: sequence.order)
        turn = self._next_turn()
        with_chunks = self._sizes.plain[1]
        places, most = with_chunks.chunks, with_chunks.chunk
        if self._programs_left and not self._is_ready(with_chunks):
            # Its program is compiled beside, and a long prompt read in more steps meanwhile.
            places = next((s.chunks for s in self._sizes.early if s.chunks and self._is_ready(s)), places)
        pieces: list[StepPiece] = []
        rows = chunks = 0
        for sequence in list(self._running):
            if sequence not in self._running or sequence.turn != turn:
                continue  # it has given its pages back, or its turn comes later
            left = len(sequence.tokens) - sequence.computed
            if left == 1 and not sequence.scoring:
                if self._reach(sequence, len(sequence.tokens)):
                    pieces.append(StepPiece(sequence, rows, 1, sequence.computed, True))
                    rows += 1
            elif chunks < places and self._reach(sequence, len(sequence.tokens)):
                chunks += self._read(sequence, pieces, chunks, places, most)
        while chunks < places and self._waiting and len(self._running) < self._most_texts():
            sequence = self._waiting[0][1]
            if sequence.turn != turn:
                break
            if not self._admit(sequence):
                self._refused = sequence, self._pool.available
                break
            self._running.append(sequence)
            heapq.heappop(self._waiting)
            self._waiting_tokens -= len(sequence.request.prompt)
            left = len(sequence.tokens) - sequence.computed
            if left == 1 and not sequence.scoring:
                pieces.append(StepPiece(sequence, rows, 1, sequence.computed, True))
                rows += 1
            else:
                chunks += self._read(sequence, pieces, chunks, places, most)
        alive = set(map(id, self._running))
        return [piece for piece in pieces if id(piece.sequence) in alive]

    def _most_texts(self) -> int:
        """How many texts are written at once: while programs are compiled beside, as many as there are programs for.

        Waiting for a larger one takes longer than writing one text after the other.
        """
        if not self._programs_left:
            return self._max_batch
        with_chunks = self._sizes.plain[1]
        ready = [
            shape.rows
            for shape in self._sizes.plain
            if not shape.chunks
            and self._is_ready(shape)
            and self._is_ready(dataclasses.replace(with_chunks, rows=shape.rows))
        ]
        return max(ready, default=self._sizes.early[0].rows)

    def _is_ready(self, shape: StepShape) -> bool:
        return all(programs.has_step(shape) for programs in self._every_program())

    def _next_turn(self) -> tuple[int, bool]:
        """Whose texts the next step computes: adapters take turns, and so do prompts that are scored."""
        present = {sequence.turn for sequence in self._running}
        if self._waiting and len(self._running) < self._most_texts():
            present.add(self._waiting[0][1].turn)
        self._turn = min((t for t in present if t > self._turn), default=min(present, default=self._turn))
        return self._turn

    def _read(self, sequence: Sequence, pieces: list[StepPiece], first: int, places: int, most: int) -> int:
        """Plan pieces of a prompt; how many."""
        at, end, used = sequence.computed, len(sequence.tokens), 0
        while at < end and first + used < places:
            count = min(most, end - at)
            pieces.append(StepPiece(sequence, -1 - (first + used), count, at, at + count == end))
            at, used = at + count, used + 1
            if self._sizes.recurrent:
                break
        return used

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence pages for all its tokens, and a slot; whether there are."""
        shared = [] if sequence.scoring else self._pool.find(sequence.tokens, sequence.salt)
        if sequence.scoring:
            sequence.prompt_scores = []
        needed = -(-len(sequence.tokens) // self._pool.page_size) - len(shared)
        own = self._pool.take(needed)
        if own is None:
            self._pool.give_back(shared)
            return False
        sequence.pages = shared + own
        sequence.computed = sequence.drafted = len(shared) * self._pool.page_size
        sequence.remembered, sequence.digest = 0, sequence.salt
        self._remember(sequence)
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
            if sequence.request.sampling.changes_logits:
                # Not before: many may wait.
                sequence.counts = np.zeros(self._vocabulary, np.int32)
                seen = sequence.seen = np.zeros(self._vocabulary, bool)
                seen[sequence.tokens] = True
            sequence.stream.cached_tokens = sequence.computed
            self._counts["cached"] += sequence.computed
            self._counts["prompt"] += len(sequence.request.prompt)
        sequence.slot = self._slots.pop()
        return True

    def _may_admit(self, running: int) -> bool:
        """Whether the next that waits may get pages and a slot when so many run, as far as is known."""
        if not self._waiting or running >= self._most_texts():
            return False
        return running < len(self._running) or self._has_pages()

    def _has_pages(self) -> bool:
        """Whether the next that waits may get pages, as far as is known."""
        refused, waiting = self._refused, self._waiting[:1]  # without the lock, others change both
        if refused is None or not waiting:
            return True
        sequence, free = refused
        return waiting[0][1] is not sequence or self._pool.available > free

    def _reach(self, sequence: Sequence, length: int) -> bool:
        """Pages for so many tokens, which others or it itself give back where there are none; whether it has them."""
        while not self._more_pages(sequence, length):
            last = max(self._running, key=lambda other: other.order)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _more_pages(self, sequence: Sequence, length: int) -> bool:
        """Pages for so many tokens, as far as there are free ones; whether it has them."""
        while len(sequence.pages) * self._pool.page_size < length:
            found = self._pool.take(1)
            if found is None:
                return False
            sequence.pages += found
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._counts["preemptions"] += 1
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._waiting_tokens += len(sequence.request.prompt)

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.give_back(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.pages, sequence.slot, sequence.computed, sequence.drafted = [], -1, 0, 0

    def _end(self, sequence: Sequence, reason: Any, error: str | RequestError | None = None) -> None:
        self._release(sequence)
        self._ended(sequence, sequence.finished or sequence.end(reason, error=error))

    def _ended(self, sequence: Sequence, reason: str) -> None:
        self._finished[reason] += 1
        self._finish_times.append(now := time.monotonic())
        if sequence.admitted is not None:
            self._turns.ended(now - sequence.admitted)
        self._there.notify_all()

    def _end_all(self, reason: Any, error: str | None = None) -> None:
        every = [*self._running, *(sequence for _, sequence in self._waiting)]
        for sequence in list(self._running):
            self._release(sequence)
        self._waiting, self._waiting_tokens = [], 0
        for sequence in every:
            self._ended(sequence, sequence.finished or sequence.end(reason, error=error))

    def _remember(self, sequence: Sequence) -> None:
        """Tell the prefix cache of pages that are full now."""
        size = self._pool.page_size
        while sequence.remembered + size <= sequence.computed:
            at = sequence.remembered
            sequence.digest = self._pool.remember(
                sequence.pages[at // size], sequence.digest, sequence.tokens[at : at + size]
            )
            sequence.remembered += size

    def _advance(self, pieces: list[StepPiece]) -> None:
        """Compute a step, and hand on what it gives."""
        if pieces[0].sequence.scoring:
            self._score(pieces)
            return
        # Once a program cannot be compiled, texts go on without guesses: it may be the one that looks at them.
        if self._speculation is not None and not self._failed and all(piece.place >= 0 for piece in pieces):
            guesses = self._guesses([piece.sequence for piece in pieces])
            if any(guesses):
                self._verify(pieces, guesses)
                return
        step: StartedStep | None = self._start(pieces)
        while step is not None:
            asked = [
                Asked(self._sizes.place(step.shape, piece), piece.sequence)
                for piece in step.pieces
                if piece.last and piece.sequence.finished is None
            ]
            choice = None
            if asked and step.count == 1:
                choice = start_choice(
                    self._programs, step.logits, asked, self._vocabulary, written=step.written
                )
            ahead = self._start_ahead(step, choice) if asked else None
            if step.count == 1:
                self._finish(step, choice)
            else:
                self._finish_several(step)
            self._answered.set()
            if step.written is not None and step.written.alive is not None:
                self._times.finished(step.shape, step.started, step.computed)
            self._progress_at = time.monotonic()
            step = ahead

    def _start(
        self, pieces: list[StepPiece], tokens: Any | None = None, alive: Any | None = None
    ) -> StartedStep:
        """Have the device compute a step.

        Args:
          tokens: as for :meth:`EngineSizes.inputs`. alive: as of :class:`TokenLoop`, if it is on the device already.
        """
        started = time.monotonic()
        rows = 1 + max((piece.place for piece in pieces), default=-1)
        chunks = max((-piece.place for piece in pieces), default=0)
        # While programs are compiled beside, a larger one that is there takes less time than waiting for the smallest.
        shape = self._sizes.shape(rows, chunks, self._is_ready if self._programs_left else None)
        # After tokens that another program chose the device does not know which texts have ended.
        count = 1 if tokens is not None and alive is None else self._tokens_at_once(shape, pieces)
        inputs = self._sizes.inputs(shape, pieces, tokens)
        adapter = pieces[0].sequence.adapter if pieces else None
        weights = None if adapter is None else adapter.weights
        loop = self._sizes.loop(shape, pieces, count, alive) if self._programs.chooses(shape) else None
        logits, self._cache, written = self._programs.step(shape, self._cache, inputs, weights, loop=loop)
        if self._draft is not None:
            late = [p.sequence for p in pieces if p.place >= 0]
            if late:
                alone = next(s for s in self._sizes.plain if s.rows >= len(late) and not s.chunks)
                self._draft.catch_up(alone, self._sizes.table, late)
            self._draft.follow(shape, inputs)
        return StartedStep(pieces, shape, logits, written, count, started)

    def _tokens_at_once(self, shape: StepShape, pieces: list[StepPiece]) -> int:
        """How many tokens of each text a step of such pieces writes; takes the pages for them."""
        if not self._programs.writes_several(shape) or self._speculation is not None or not self._use_cache:
            return 1
        count = min(self._times.at_once(shape), *(piece.sequence.most - piece.written for piece in pieces))
        if count < 2 or not all(piece.sequence.is_plain for piece in pieces):
            return 1
        with self._there:
            # A text that ends within a call leaves its place to none of those that wait, and turns are a step each.
            if self._waiting or len({sequence.turn for sequence in self._running}) > 1:
                return 1
            # Nobody gives pages back for later tokens.
            while count > 1 and self._missing_pages(pieces, count) > self._pool.available:
                count -= 1
            if count > 1:
                for piece in pieces:
                    self._more_pages(piece.sequence, piece.start + count)
        return count

    def _missing_pages(self, pieces: list[StepPiece], count: int) -> int:
        """How many pages texts need beside their own for so many tokens more."""
        size = self._pool.page_size
        return sum(max(0, -(-(piece.start + count) // size) - len(piece.sequence.pages)) for piece in pieces)

    def _start_ahead(self, step: StartedStep, choice: Choice | None) -> StartedStep | None:
        """Have the device compute the step after one whose tokens are not known here yet, if it can be said without
        them what that step computes.

        So the device goes on while its tokens are handed on, grammars read them and the next step is prepared. A text
        that ends with its token has then been computed for nothing (where the device knows the end, of several tokens
        at once, it has not), and what the step wrote of it lies in pages that are given to others only by later steps.
        Nobody gives pages back for a step ahead.

        Args:
          choice: of the step's tokens; ``None``: several of each text are written by the step itself.
        """
        if step.shape.chunks or self._speculation is not None or not self._use_cache:
            return None
        with self._there:
            self._drop()
            running = {id(piece.sequence) for piece in step.pieces if piece.sequence.finished is None}
            if self._closed or running != set(map(id, self._running)):
                return None
            pieces = []
            for piece in step.pieces:
                sequence = piece.sequence
                last = sequence.written + step.count >= sequence.most
                if last or sequence.complete or sequence.failure is not None:
                    running.discard(id(sequence))
                elif sequence.finished is None:
                    pieces.append(StepPiece(sequence, piece.place, 1, piece.start + step.count, True))
            if not pieces or self._may_admit(len(running)):
                return None
            if self._host_computes and any(piece.sequence.changes_logits for piece in pieces):
                return None
            if self._sizes.shape(len(pieces), 0) != step.shape:
                return None  # fewer rows take less time, in other places
            for piece in pieces:
                if not self._more_pages(piece.sequence, piece.start + 1):
                    return None
        written = step.written
        if written is not None and (choice is None or choice.chosen.tokens is written.last):
            return self._start(pieces, written.last, written.alive)
        assert choice is not None
        return self._start(pieces, choice.chosen.tokens)

    def _finish(self, step: StartedStep, choice: Choice | None) -> None:
        """Wait for a step, and hand on what it gives."""
        found = [] if choice is None else list(zip(choice.asked, choice.read(), strict=True))
        if choice is None and any(piece.sequence.finished is None for piece in step.pieces):
            jax.block_until_ready(step.logits)
        computed = step.computed
        with self._there:
            self._counts["steps"] += computed
            for piece in step.pieces:
                sequence = piece.sequence
                if sequence.finished is not None:
                    continue
                if sequence.drafted == piece.start:
                    sequence.drafted = piece.start + piece.count
                sequence.computed = max(sequence.computed, piece.start + piece.count)
                self._remember(sequence)
            for one, token in found:
                self._take(one.sequence, [token])

    def _finish_several(self, step: StartedStep) -> None:
        """Wait for a step that writes several tokens of each text, and hand them on.

        Also where all of them have ended: what it computed is counted.
        """
        assert step.written is not None
        tokens = np.asarray(step.written.tokens)
        with self._there:
            self._counts["steps"] += step.computed
            for piece in step.pieces:
                sequence = piece.sequence
                for number in range(step.count):
                    if sequence.finished is not None or sequence.cancelled:
                        break
                    sequence.computed = max(sequence.computed, piece.start + number + 1)
                    self._remember(sequence)
                    self._take(sequence, [(int(tokens[number, piece.place]), None)])

    def _take(self, sequence: Sequence, found: list[tuple[int, Any]]) -> None:
        """Tokens that a step gave to a text."""
        if sequence.cancelled or sequence.finished is not None:
            return  # it ends before the next step, or the engine was closed during this one
        if sequence.failure is not None:
            self._end(sequence, "error", sequence.failure)
            return
        if sequence.complete:
            self._end(sequence, "stop")
            return
        for token, score in found:
            self._counts["generated"] += 1
            try:
                reason = sequence.add(token, score)
            except Exception as error:
                # The text cannot go on; all others can.
                self._end(sequence, "error", f"{type(error).__name__}: {error!s:.500}")
                return
            if reason is not None:
                self._end(sequence, reason)
                return
        if not self._use_cache:
            sequence.computed = 0

    def _score(self, pieces: list[StepPiece]) -> None:
        """A step that reads prompts, and scores every token of them."""
        shape = self._sizes.scored
        inputs = self._sizes.inputs(shape, pieces)
        inputs["outputs"] = np.arange(shape.tokens, dtype=np.int32)
        adapter = pieces[0].sequence.adapter
        weights = None if adapter is None else adapter.weights
        logits, self._cache, _ = self._programs.step(shape, self._cache, inputs, weights)
        if self._draft is not None:
            self._draft.follow(self._sizes.plain[1], self._sizes.inputs(self._sizes.plain[1], pieces))
        targets = np.zeros(shape.tokens, np.int32)
        asked: list[Asked] = []
        for piece in pieces:
            first = self._sizes.place(shape, piece) * shape.chunk
            known = piece.sequence.tokens[piece.start + 1 : piece.start + piece.count + 1]
            targets[first : first + len(known)] = known
            if piece.last and piece.sequence.most:
                asked.append(Asked(first + piece.count - 1, piece.sequence))
        logprobs, top_logprobs, top_tokens = map(np.asarray, self._programs.score(logits, targets))
        following = choose_tokens(self._programs, logits, asked, self._vocabulary) if asked else []
        chosen = {id(one.sequence): token for one, token in zip(asked, following, strict=True)}
        with self._there:
            self._counts["steps"] += 1
            for piece in pieces:
                sequence, first = piece.sequence, self._sizes.place(shape, piece) * shape.chunk
                if sequence.finished is not None:
                    continue  # all that was asked for was in an earlier piece
                was_scoring = sequence.scoring
                sequence.computed = piece.start + piece.count
                sequence.drafted = sequence.computed if self._draft is not None else 0
                self._remember(sequence)
                number = sequence.request.prompt_logprobs
                if not sequence.prompt_scores:
                    sequence.prompt_scores.append(TokenScore(sequence.tokens[0], math.nan))
                for at in range(first, first + min(piece.count, len(sequence.tokens) - 1 - piece.start)):
                    likeliest = zip(top_tokens[at, :number], top_logprobs[at, :number], strict=True)
                    top = tuple((int(t), float(p)) for t, p in likeliest)
                    sequence.prompt_scores.append(TokenScore(int(targets[at]), float(logprobs[at]), top))
                if sequence.scoring or sequence.cancelled:
                    continue
                # Of the prompt's last token, which may lie in a later piece or step, nothing is scored.
                if was_scoring:
                    sequence.stream.put(Piece(prompt_scores=tuple(sequence.prompt_scores)))
                if not sequence.most:
                    self._end(sequence, "length")
                elif piece.last:
                    self._take(sequence, [chosen[id(sequence)]])

    # ---- guesses ------------------------------------------------------------------------------------------

    def _guesses(self, sequences: list[Sequence]) -> list[list[int]]:
        """What may follow each text, as far as it has room and pages."""
        settings = self._speculation
        assert settings is not None
        counts = []
        with self._there:
            for sequence in sequences:
                count = min(settings.tokens, sequence.most - sequence.written - 1)
                if count < 1:
                    counts.append(0)
                    continue
                length = len(sequence.tokens)
                missing = -(-(length + count) // self._pool.page_size) - len(sequence.pages)
                # Nobody gives pages back for a guess.
                sequence.pages += (self._pool.take(missing) or []) if missing > 0 else []
                counts.append(min(count, len(sequence.pages) * self._pool.page_size - length))
        if self._draft is not None:
            shape = next(s for s in self._sizes.plain if s.rows >= len(sequences) and not s.chunks)
            return self._draft.guess(shape, self._sizes.table, sequences, counts)
        found = []
        for sequence, count in zip(sequences, counts, strict=True):
            if count and sequence.earlier is None:
                sequence.earlier = Earlier(settings.longest)
            if not count:
                found.append([])
                continue
            forced = [] if sequence.grammar is None else sequence.grammar.forced()[:count]
            guess = [*forced, *sequence.earlier.guess(sequence.tokens, count - len(forced), forced)]
            if sequence.grammar is not None:
                del guess[sequence.grammar.follow(guess) :]
            # A grammar may force what its tokenizer has and the model has not.
            found.append(list(itertools.takewhile(lambda token: token < self._writable, guess)))
        return found

    def _verify(self, pieces: list[StepPiece], guesses: list[list[int]]) -> None:
        """A step that looks at guesses; those that are right are kept, and the token after them."""
        shape = next(s for s in self._sizes.guessed if s.chunks >= len(pieces))
        inputs = self._sizes.inputs(shape)
        inputs["outputs"] = np.arange(shape.tokens, dtype=np.int32)
        asked = []
        for place, (piece, guess) in enumerate(zip(pieces, guesses, strict=True)):
            sequence, first = piece.sequence, place * shape.chunk
            given = [sequence.tokens[-1], *guess]
            inputs["tokens"][first : first + len(given)] = given
            inputs["starts"][place], inputs["counts"][place] = piece.start, len(given)
            inputs["page_table"][place, : len(sequence.pages)] = sequence.pages
            inputs["slots"][place] = sequence.slot
            asked += [Asked(first + n, sequence, tuple(guess[:n])) for n in range(len(given))]
        adapter = pieces[0].sequence.adapter
        weights = None if adapter is None else adapter.weights
        logits, self._cache, _ = self._programs.step(shape, self._cache, inputs, weights)
        chosen = iter(choose_tokens(self._programs, logits, asked, self._vocabulary))
        with self._there:
            self._counts["steps"] += 1
            for piece, guess in zip(pieces, guesses, strict=True):
                sequence = piece.sequence
                if sequence.finished is not None:
                    continue
                found = [next(chosen) for _ in range(1 + len(guess))]
                right = next((n for n, token in enumerate(guess) if found[n][0] != token), len(guess))
                self._counts["guessed"] += len(guess)
                self._counts["right"] += right
                # Keys and values of wrong guesses are written over by those of the tokens in their places.
                computed = piece.start + 1 + right
                sequence.drafted = min(sequence.drafted, computed)
                for one in found[: 1 + right]:
                    if sequence.finished is None and one[0] >= 0:
                        self._take(sequence, [one])
                if sequence.finished is None and not sequence.cancelled:
                    # Of a text that a grammar ends after a guess the next step says so.
                    sequence.computed = min(computed, len(sequence.tokens) - 1)
                    self._remember(sequence)
