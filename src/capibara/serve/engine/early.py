"""The first programs of an engine, made while the weights of its model are read."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import Tokenizer
from capibara.families.on_host import Packed
from capibara.memory.budget import device_budget
from capibara.serve.engine.arrays import bytes_of_one_device, describe_arrays
from capibara.serve.engine.layers import (
    as_computed,
    bytes_held,
    layers_apart,
    packing_of,
    room_for_panels,
)
from capibara.serve.engine.programs import Programs, kept_programs, pages_in_memory
from capibara.serve.engine.steps import EngineSizes
from capibara.serve.loaded import take_tokenizer

__all__ = ["Early", "EarlyPrograms"]


class Early(NamedTuple):
    """The compiled programs, their sizes, the model's tokenizer, empty pools for keys and values, and whether matrices
    are packed into panels."""

    programs: Programs
    sizes: EngineSizes
    tokenizer: Tokenizer
    cache: Any
    panels: bool


class EarlyPrograms:
    """Traces and compiles what plain requests need, in a thread: only the shapes of weights have to be known.

    For one CPU device, where neither part has the processor for itself alone, and an engine with
    ``donate_params=True``.

    Args:
      config: of the model. tokenizer: the folder of its tokenizer, or the files of it by name.
      describe: returns descriptions of the model's parameters and state as they will be loaded.
      sizes: keyword arguments of :meth:`EngineSizes.of`. pages: how many; by default as for an engine.
    """

    def __init__(
        self,
        config: ModularModelConfig,
        tokenizer: str | os.PathLike[str] | Mapping[str, bytes],
        *,
        describe: Callable[[Any], tuple[Any, Any]] = describe_arrays,
        pages: int | None = None,
        **sizes: Any,
    ) -> None:
        self._given = config, tokenizer, describe, pages, sizes
        self._found: Early | None = None
        self._packing: Future[Mapping[tuple[str, ...], Packed]] = Future()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._work, name="capibara-early-programs", daemon=True)
        self._thread.start()

    def wait_for_xla(self) -> None:
        """Wait until the programs are in the hands of the threads that compile them.

        In a warm start XLA is then at work. What others do in Python before, such as large imports, makes it begin
        later.
        """
        self._begun.wait()

    def packing(self) -> Mapping[tuple[str, ...], Packed]:
        """What of the model's weights is to be in panels when it is loaded: what the programs expect there.

        Who waits for it before loading may begin then: the memory that is free has been looked at.
        """
        return self._packing.result()

    def take(self) -> Early | None:
        """What was made, when it is there, for whom asks first; ``None`` if an argument was wrong, which the engine
        itself says better."""
        self._thread.join()
        found, self._found = self._found, None
        return found

    def _work(self) -> None:
        try:
            self._found = self._made()
        except Exception:  # the engine will do the same, and say what is wrong
            return
        finally:
            if not self._packing.done():
                self._packing.set_result({})
            self._begun.set()

    def _made(self) -> Early:
        config, tokenizer, describe, pages, given = self._given
        model = ModularCapibaraModel(config)
        if isinstance(tokenizer, Mapping):
            model.tokenizer_files = dict(tokenizer)
        else:
            take_tokenizer(model, tokenizer)
        sizes = EngineSizes.of(model, **given)
        params, state = describe(model)
        model = as_computed(model)
        panels = room_for_panels(model, params, donate=True, there=False)
        free = device_budget().free() if pages is None else 0
        # Who waits for this begins to read the weights.
        self._packing.set_result(packing_of(model, params) if panels else {})
        parts = layers_apart(model, params, panels=panels)
        if pages is None:
            # The engine will ask when the weights are there.
            free -= bytes_held(params, parts, donate=True) + bytes_of_one_device(state)
            most, kind = sizes.pages - 1, sizes.cache_dtype
            pages = pages_in_memory(model, sizes.page_size, kind, least=sizes.table, most=most, free=free)
        sizes = dataclasses.replace(sizes, pages=1 + pages)
        writable = min(config.model.vocab_size, model.tokenizer.vocab_size)
        untraced = kept_programs(model, parts, state, writable=writable)
        programs = Programs(model, parts, state, writable=writable, untraced=untraced)
        cache = programs.describe_cache(sizes)
        first, _ = programs.to_compile(sizes.every, cache, sizes.inputs, early=programs.early(sizes))
        # One is traced, in Python, while XLA is at another.
        with ThreadPoolExecutor(2, thread_name_prefix="capibara-early-programs") as pool:
            empty = pool.submit(programs.empty_cache, sizes)
            work = [pool.submit(compile_one) for compile_one in first]
            self._begun.set()
            for one in work:
                one.result()
            cache = empty.result()
        return Early(programs, sizes, model.tokenizer, cache, panels)
