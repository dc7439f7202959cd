"""A compressed model: its archive, and the decoded model on request.

Only the archive is kept; it is decoded when the model is first run or accessed. A new archive is in a temporary
folder, which is removed with the object; ``save`` copies it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.container import Archive
from capibara.compress.errors import ArchiveError, CompressError, FolderError
from capibara.compress.folders import find_archives, join_archives
from capibara.compress.merged_models import MERGED, is_pairs, relu_chain, resized
from capibara.compress.models.adapters import STRUCTURE, Adapter, adapt, assemble
from capibara.compress.models.numbers import from_bits, is_torch
from capibara.compress.profile import CompressionProfile
from capibara.compress.running import Running, check_decode, refuse
from capibara.compress.saving import make_folder, save_module
from capibara.compress.statistics import CompressionStats, stats_of
from capibara.files import replace_file

if TYPE_CHECKING:
    from capibara.compress.jax_codes import CodedArrays
    from capibara.compress.tropical import Merged

__all__ = ["PROFILE", "STATS", "CompressedModel", "make_folder", "open_compressed"]

PROFILE, STATS = "capibara.profile", "capibara.stats"  # keys of an archive's metadata


class CompressedModel:
    """A compressed model, created by :class:`ModelCompressionAPI` or by :meth:`load`.

    For a ``torch.nn.Module`` it is a module itself: it has ``parameters``, ``state_dict`` with the original's names,
    ``to`` and gradients, and can be part of another module.

    Attributes:
      path: the archive.
      stats: sizes and errors, :class:`CompressionStats`.
      profile: the goals; ``None`` for an archive created in another way.
      merged: the result of merging neurons, layer by layer, with Hausdorff bounds; ``None`` otherwise, and after
        ``load``.

    With ``decode=False`` or ``"auto"``, weights stored with ``int8``, ``int4`` or ``nf4`` stay quantized and are
    multiplied that way (:mod:`~capibara.compress.jax_codes`, :mod:`~capibara.compress.torch_codes`): the model takes
    about as much memory as the file. :attr:`running` lists them.
    """

    path: Path
    stats: CompressionStats
    profile: CompressionProfile | None
    merged: Merged | None = None
    _adapter: Adapter | None
    _owned: Any

    def __init__(
        self,
        path: str | os.PathLike[str],
        adapter: Adapter | None = None,
        *,
        owned: Any = None,
        decode: bool | str = True,
    ) -> None:
        check_decode(decode)
        with Archive(path) as archive:
            known = _object(archive.metadata.get(STATS, "{}"), path, dict)
            profile = _object(archive.metadata.get(PROFILE, "{}"), path, dict)
            stats = stats_of(archive, known)
            if adapter is not None:
                _check_fit(archive, adapter)
        self.path, self.stats = Path(path), stats
        try:
            self.profile = None if not profile else CompressionProfile(**profile)
        except TypeError:
            raise ArchiveError(f"{path}: its profile has fields that are not known here") from None
        self._adapter, self._owned, self._decoded, self._own = adapter, owned, None, None
        self._coded, self._why = None, "decode=True"
        if decode is not True and adapter is not None and adapter.kind != "torch":
            self._coded = self._load_codes(adapter, decode)

    def _load_codes(self, adapter: Adapter, decode: bool | str) -> CodedArrays | None:
        if "jax" not in sys.modules:
            why = dict.fromkeys(adapter.arrays, "an array of NumPy's")
        else:
            from capibara.compress.jax_codes import CodedArrays

            with Archive(self.path) as archive:
                found = CodedArrays(archive, adapter)
            if found.quantized:
                self._adapter = adapter.skeleton()  # the original's arrays may go
                return found
            why = found.why
        if decode is False:
            refuse(self.path, why)
        self._why = "none of its weights can run quantized"
        return None

    @property
    def running(self) -> Running:
        """Which weights run quantized, and the memory that the model takes."""
        size, coded = self.path.stat().st_size, self._coded
        if coded is not None:
            return Running(coded.quantized, dict(coded.why), dict(coded.on_the_way), coded.nbytes, size)
        names = [t.name for t in self.stats.tensors]
        whole = sum(t.original_bytes for t in self.stats.tensors if not t.codec.startswith("="))
        return Running((), dict.fromkeys(names, self._why), {}, whole, size)

    @property
    def model(self) -> Any:
        """The decoded model, of the same kind as the original; decoded once.

        For ``params`` with an ``apply``, it is the parameters. Without the original (after ``load(path)``), it is a
        nested dict of NumPy arrays if the archive stores the nesting, otherwise a flat one. Without decoding,
        quantized weights are :class:`~capibara.compress.direct.QuantisedMatrix` and the like, for functions wrapped
        by :func:`~capibara.compress.jax_codes.quantized`.

        Raises:
          DamagedError: a tensor is damaged.
        """
        if self._coded is not None:
            return self._coded.tree
        if self._decoded is None:
            self._decoded = self.decompress()
        return self._decoded

    def decompress(self) -> Any:
        """As :attr:`model`, decoded again: changes to it do not affect this object."""
        with Archive(self.path) as archive:
            if self._coded is not None:
                return self._coded.decoded(archive)
            if self._adapter is not None:
                return self._adapter.rebuild(lambda name: archive.read(name).reshape(-1))

            @functools.cache
            def make(name: str) -> np.ndarray:
                if name not in archive.entries:
                    raise ArchiveError(f"{self.path}: its metadata names a missing tensor: {name!r:.200}")
                entry = archive[name]
                if entry.same_as is not None:
                    return make(entry.same_as)
                return from_bits(archive.read(name), entry.format, entry.shape)

            if (text := archive.metadata.get(STRUCTURE)) is not None:
                return assemble(_object(text, self.path), make)
            return {entry.name: make(entry.name) for entry in archive}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: a module with its own arguments, any other kind with its inputs.

        Raises:
          CompressError: it is not known how to run it.
        """
        if self._adapter is None:
            raise CompressError(
                f"{self.path}: an archive holds tensors, not the code that runs them. Remedy: "
                "CompressedModel.load(path, model), with the model whose weights these are."
            )
        if len(args) != 1 or kwargs:
            raise CompressError(f"inputs: got {len(args)} and {sorted(kwargs)}, expected one argument")
        if self._coded is not None:
            return self._coded.run(args[0])
        return self._adapter.run(self.model, args[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What else the original has: ``config``, ``generate``, ``device`` …, with the numbers that this one has."""
        adapter = self.__dict__.get("_adapter")
        original = None if adapter is None or name.startswith("_") else adapter.owner()
        if adapter is None or original is None or not _has(original, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        if self._own is None:
            self._own = adapter.owner(self.model)
        value = getattr(self._own, name)
        if self._coded is not None and getattr(value, "__self__", None) is self._own:
            return functools.partial(self._coded.call, name)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedModel:
        """Another one of the same archive, whose numbers are its own."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        shared = ("_adapter", "_owned", "_coded")  # a copy of what keeps the file would not keep it
        state = {k: v if k in shared else copy.deepcopy(v, memo) for k, v in self.__dict__.items()}
        new.__dict__.update(state, _own=None)
        return new

    def __copy__(self) -> CompressedModel:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CompressError(
            "a compressed model is not pickled. Remedy: save(path), and CompressedModel.load(path, model) there."
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an archive of the model, atomically.

        For a ``torch.nn.Module``, the archive has the module's current tensors: those trained or loaded since are
        stored losslessly, with a warning if they were rounded before; the others as they were compressed. For other
        kinds of models, whose arrays this object does not own, it is the original archive, regardless of changes to
        :attr:`model`.

        Raises:
          FolderError: ``path`` is a folder.
          CompressError: a tensor now has a dtype that files do not support.
          OSError: the folder is missing, the disk is full …; an existing file is then unchanged.
        """
        target = Path(path)
        if target.is_dir():
            raise FolderError(
                f"path: {target} is a folder, expected a file to write. Remedy: {target / 'model.capi'}"
            )
        if not self._save_changed(target) and not (target.exists() and target.samefile(self.path)):
            with open(self.path, "rb") as source:
                replace_file(target, functools.partial(shutil.copyfileobj, source))
        return target

    def _save_changed(self, target: Path) -> bool:
        """Write what the model holds, where that is known and not what the archive does; whether it was."""
        return False

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any = None,
        *,
        apply: Callable[[Any, Any], Any] | None = None,
        decode: bool | str = True,
    ) -> CompressedModel:
        """Open an archive.

        Args:
          path: an archive written by :meth:`save`, ``capibara compress`` …; or a folder whose archives together
            contain the model.
          model: a model of the same kind as the original, with any values, so that the compressed model can be run. A
            module may be on the device ``"meta"``.
          apply: runs a tree of arrays.
          decode: ``True``: decode all weights. ``False``: those stored with ``int8``, ``int4`` or ``nf4`` stay
            quantized where the model can run that way. ``"auto"``: the same, without an error if none can.

        Raises:
          ArchiveError: not an archive, or a damaged one.
          CompressError: its tensors are not those of ``model``; or ``decode=False``, and no weight can run quantized.
          OSError: it cannot be read.
        """
        owned = None
        if Path(path).is_dir():
            path, owned = _joined(Path(path))
        if model is None:
            if apply is not None:
                raise CompressError(
                    "apply: got a function, but no model. Remedy: load(path, model, apply=…)."
                )
            check_decode(decode)
            if decode is False:
                raise CompressError(
                    "decode: got False, but no model that runs. Remedy: load(path, model, decode=False), or "
                    "capibara.compress.load_quantised."
                )
            return CompressedModel(path, owned=owned)
        with Archive(path) as archive:
            if MERGED in archive.metadata:
                model = resized(model, archive)
                apply = relu_chain if apply is None and is_pairs(model) else apply
        return open_compressed(path, adapt(model, apply), owned, decode)

    def reopened(self, decode: bool | str) -> CompressedModel:
        """The same archive, run in another way; for one opened with ``decode=True``."""
        assert self._adapter is not None
        new = open_compressed(self.path, self._adapter, self._owned, decode)
        new.stats, new.merged = self.stats, self.merged
        return new

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"CompressedModel({len(s.tensors)} tensors, {s.original_bytes:,} bytes as {s.compressed_bytes:,}, "
            f"ratio {s.compression_ratio:.2f})"
        )


def _has(thing: Any, name: str) -> bool:
    """Whether an object has an attribute; properties are not computed to find out."""
    missing = object()
    dynamic = hasattr(type(thing), "__getattr__")
    return hasattr(thing, name) if dynamic else inspect.getattr_static(thing, name, missing) is not missing


def open_compressed(
    path: str | os.PathLike[str], adapter: Adapter, owned: Any = None, decode: bool | str = True
) -> CompressedModel:
    """A compressed model that can be run, of the class that matches the original."""
    kind = _torch_class() if adapter.kind == "torch" else CompressedModel
    return kind(path, adapter, owned=owned, decode=decode)


def _joined(folder: Path) -> tuple[Path, Any]:
    """The archive of a folder; several as one in a temporary folder, and what keeps that.

    Raises:
      CompressError: no archive, or two with a tensor of one name.
    """
    paths = find_archives(folder)
    if len(paths) == 1:
        return paths[0], None
    made, keeper = make_folder()
    join_archives(paths, made / "model.capi")
    return made / "model.capi", keeper


def _object(text: str, path: object, kind: Any = dict | str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ArchiveError(f"{path}: its metadata is not what Capibara writes") from None
    if not isinstance(value, kind):
        raise ArchiveError(f"{path}: its metadata is not what Capibara writes")
    return value


def _read_stats(path: Path) -> CompressionStats:
    with Archive(path) as archive:
        return stats_of(archive, _object(archive.metadata.get(STATS, "{}"), path, dict))


def _check_fit(archive: Archive, adapter: Adapter) -> None:
    forms = adapter.tensors.forms
    missing = [n for n in forms if n not in archive.entries]
    unknown = [n for n in archive.entries if n not in forms]
    if missing or unknown:
        raise CompressError(
            f"model: {archive.path} does not hold its tensors: missing {missing[:5]}, unknown {unknown[:5]}. "
            "Remedy: the model that was compressed."
        )
    for name, (form, shape) in forms.items():
        entry = archive[name]
        if (entry.format, entry.shape) != (form, shape):
            raise CompressError(
                f"model: {name} is {form.name} {shape}, in {archive.path} {entry.format.name} {entry.shape}"
            )


@functools.cache
def _torch_class() -> type[CompressedModel]:
    """The class of compressed modules; made when torch is there for certain."""
    torch = sys.modules["torch"]

    class CompressedTorchModel(CompressedModel, torch.nn.Module):
        __doc__ = CompressedModel.__doc__

        def __init__(
            self, path: Any, adapter: Adapter, *, owned: Any = None, decode: bool | str = True
        ) -> None:
            torch.nn.Module.__init__(self)
            CompressedModel.__init__(self, path, adapter, owned=owned, decode=decode)
            training = adapter.model.training
            self._names: tuple[list[str], dict[str, str]] | None = None
            if decode is not True:
                from capibara.compress.torch_codes import coded_module

                with Archive(self.path) as archive:
                    module, names, why = coded_module(adapter.model, archive, adapter.tied)
                if decode is False and not names:
                    refuse(self.path, why)
                self._names, self._tied = (names, why), dict(adapter.tied)
                self._adapter = None  # the original's numbers may go
            else:
                module = CompressedModel.decompress(self)
            # Its parts are this one's own, under the same names; it stands beside them, and not among them.
            self.__dict__["module"] = module
            for own in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
                self.__dict__[own] = getattr(module, own)
            if left := [n for n, v in self.module.state_dict().items() if is_torch(v) and v.is_meta]:
                raise CompressError(f"model: {left[0]} is on the device 'meta', and not in {self.path}")
            unsaved = [n for n, b in self.module.named_buffers() if b.is_meta]
            if unsaved:
                raise CompressError(
                    f"model: the buffer {unsaved[0]} is on the device 'meta', and no archive holds it. "
                    "Remedy: make the model on another device."
                )
            self.train(training)

        @property
        def model(self) -> Any:
            return self.module

        @property
        def running(self) -> Running:
            kept = {id(t): t.nbytes for t in (*self.module.parameters(), *self.module.buffers())}
            names, why = self._names or ([], {t.name: "decode=True" for t in self.stats.tensors})
            return Running(tuple(names), why, {}, sum(kept.values()), self.path.stat().st_size)

        def decompress(self) -> Any:
            if self._names is None:
                return CompressedModel.decompress(self)
            from capibara.compress.torch_codes import decoded_module, put_tensors

            made = decoded_module(self.module)
            with Archive(self.path) as archive:
                put_tensors(made, archive, [t.name for t in self.stats.tensors], self._tied)
            return made

        def _save_changed(self, target: Path) -> bool:
            written = save_module(self.module, self.path, target, STATS)
            if written and target.samefile(self.path):
                self.stats = _read_stats(target)
            return written

        @property
        def forward(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            """The original's, with its signature: ``torch.export`` names arguments and open sizes by that."""

            @functools.wraps(self.module.forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                return self.module(*args, **kwargs)

            return run

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return torch.nn.Module.__call__(self, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            """What else the original has: ``config``, ``generate``, ``device`` …"""
            try:
                return torch.nn.Module.__getattr__(self, name)
            except AttributeError:
                if name == "module" or "module" not in self.__dict__:
                    raise
                return getattr(self.__dict__["module"], name)

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            self.module._apply(*args, **kwargs)
            return self

        def train(self, mode: bool = True) -> Any:
            self.module.train(mode)
            self.training = mode
            return self

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.module.load_state_dict(*args, **kwargs)

        def __repr__(self) -> str:
            return CompressedModel.__repr__(self)

    CompressedTorchModel.__qualname__ = CompressedTorchModel.__name__
    return CompressedTorchModel
