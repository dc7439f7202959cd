"""Checkpoints that are written atomically, and verified before use.

A checkpoint is a folder named by its step. It is built under a temporary name: Orbax writes the arrays, the settings
and a small ``meta.json`` are added, and finally ``manifest.json`` records size and SHA-256 of every file. Everything
is synced to disk before a ``rename`` gives the folder its name. So a kill leaves at most a temporary folder, which
the next run removes; and later corruption (truncation, a flipped bit) is detected as a difference to the manifest, in
which case the previous checkpoint is used::

    checkpoints/
      400/
        model/          Orbax: params, state
        training/       Orbax: what only training needs (optimizer state, step, key)
        config.toml     the settings
        tokenizer/      tokenizer.json …, if tokens are not bytes
        meta.json       step, seconds trained, fingerprint of the text
        manifest.json   {"files": {"model/…": [bytes, sha256], …}}
      600/ …
      best            a link to one of them, if that is asked for

The Orbax folders are ordinary ones: ``orbax.checkpoint.StandardCheckpointer().restore(folder / "400/model")``
reads them. Nothing in a checkpoint is pickled.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError
from capibara.files import fsync_folder
from capibara.train import extras
from capibara.train.checkpoint_files import (
    difference,
    digest_of,
    first_line,
    read_json,
    relative_files,
    storage_reason,
    sync_and_digest,
)
from capibara.train.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ResumeMismatchError,
)
from capibara.train.processes import Processes
from capibara.train.quiet_orbax import dropping_readers, quiet_orbax
from capibara.train.rundir import atomic_write, prepare_folder

__all__ = ["Checkpoint", "CheckpointStore", "open_checkpoint"]

_FORMAT = 1
_TEMPORARY = ".tmp-"
_REPLACED = re.compile(r"\.tmp-(\d+)-\d+-[0-9a-f]+-old")
_DAMAGED = "damaged-"
_TOKENIZER = "tokenizer"
_BEST = "best"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files matched their checksums when it was opened.

    Attributes:
      path: its folder.
      step: optimizer steps taken.
      meta: the ``meta`` passed to ``save``.
    """

    path: Path
    step: int
    meta: Mapping[str, Any]

    @property
    def config_path(self) -> Path:
        """The settings it was trained with, as TOML."""
        return self.path / "config.toml"

    @property
    def tokenizer_path(self) -> Path:
        """The folder of its tokenizer's files; there is none if tokens are bytes."""
        return self.path / _TOKENIZER

    @property
    def is_import(self) -> bool:
        """Whether it holds a model that was not trained here: there is no state of training."""
        return not (self.path / "training").is_dir()

    def restore(self, item: str, target: Any) -> Any:
        """Read one item.

        Args:
          item: ``"model"``, ``"training"`` …
          target: a pytree of ``jax.ShapeDtypeStruct`` (with ``sharding``) that specifies what to read and where to
          place it.

        Raises:
          ResumeMismatchError: the checkpoint has other arrays than ``target``.
          CheckpointDamagedError: its checksums fit, but not what its files say.
        """
        ocp = extras.orbax()
        path = self.path.absolute() / item
        with (
            quiet_orbax(),
            self._naming(item),
            dropping_readers(),
            ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer,
        ):
            # Compared here, because Orbax casts where types differ and says little where trees do.
            if differs := difference(checkpointer.metadata(path).item_metadata.tree, target):
                raise ResumeMismatchError(
                    f"the checkpoint {str(self.path)!r} does not have the arrays that these settings need: "
                    f"{item}/{differs}. Start over with --fresh, or choose another checkpoint.directory "
                    f"(--directory)."
                )
            return checkpointer.restore(path, args=ocp.args.StandardRestore(target))

    @contextmanager
    def _naming(self, item: str) -> Iterator[None]:
        """Orbax raises whatever its parser, or TensorStore, stumbles over."""
        try:
            yield
        except (CapibaraError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointDamagedError(
                f"the checkpoint {str(self.path)!r} cannot be read: {item}: {first_line(error)}. Restore the folder "
                "from a copy, or start over with --fresh."
            ) from error


class CheckpointStore:
    """The checkpoints of one run, in their own folder.

    Args:
      folder: created when something is saved.
      keep: number of newest checkpoints to keep.
      keep_every: those whose step is a multiple of it are kept too; 0: none.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, keep_every: int = 0) -> None:
        self.folder = Path(folder)
        self.keep, self.keep_every = keep, keep_every

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, oldest first.

        Raises:
          CheckpointNotFoundError: the folder cannot be read.
        """
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:  # ValueError: the path holds a NUL
            raise CheckpointNotFoundError(
                f"can not look for checkpoints in {str(self.folder)[:200]!r}: "
                f"{getattr(error, 'strerror', None) or error}. Check the path and its permissions."
            ) from None
        return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,18}", name))

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of one step after comparing every file with the manifest.

        Raises:
          CheckpointDamagedError: a file is missing, added, truncated or changed.
        """
        return open_checkpoint(self.folder / str(step))

    def newest(self, *, warn: Callable[[str], None] | None = None) -> Checkpoint | None:
        """Open the newest intact checkpoint, or return None if there is no checkpoint.

        Args:
          warn: callback for each damaged checkpoint that is skipped.

        Raises:
          CheckpointDamagedError: there are checkpoints, but every one is damaged.
        """
        steps = self.steps()
        problems = []
        for step in reversed(steps):
            try:
                return self.open(step)
            except CheckpointDamagedError as error:
                problems.append(str(error))
                if warn is not None:
                    warn(f"{error} Falling back to the one before it.")
        if problems:
            raise CheckpointDamagedError(
                f"no checkpoint in {str(self.folder)!r} is whole ({len(problems)} damaged; the newest: "
                f"{problems[0]}) Restore the folder from a copy, or start over with --fresh."
            )
        return None

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        meta: Mapping[str, Any],
        config_toml: str,
        tokenizer: Mapping[str, bytes] | None = None,
        best: bool = False,
        processes: Processes | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Write a checkpoint and, once it is complete, remove those that nothing keeps.

        Of several processes each has to call it: all write the parts of the arrays that they hold, into one folder, and
        process 0 the rest.

        Args:
          step: its name. A checkpoint of the same step is replaced.
          items: name → pytree of arrays; each becomes an Orbax folder.
          meta: JSON values.
          config_toml: the settings as TOML text.
          tokenizer: name → content of the tokenizer's files, if it is not bytes.
          best: whether it is better than all before: the link ``best`` points to it, and it is kept.
          processes: how they agree; by default with the devices, as all of training does.
          go_on: called before the checkpoint gets its name; what it raises ends the save.

        Raises:
          CheckpointWriteError: the disk is full, a file may not be written …; earlier checkpoints are unchanged.
        """
        processes, final = processes or Processes.here(), self.folder / str(step)
        content = {"format": _FORMAT, "step": step, **meta}

        def begin() -> str:
            # A name of its own: a save that was given up may still be writing into another one.
            temporary = self.folder / f"{_TEMPORARY}{step}-{os.getpid()}-{secrets.token_hex(4)}"
            with self._explaining(step, temporary):
                prepare_folder(self.folder)
                _check_space(self.folder, items)
                temporary.mkdir()
            return temporary.name

        temporary = self.folder / processes.first_does(begin)
        with self._explaining(step, temporary), quiet_orbax():
            for name, tree in items.items():
                _write_item(temporary.absolute() / name, tree, processes)  # each process its own parts

        def add_the_rest() -> list[str]:
            with self._explaining(step, temporary):
                (temporary / "meta.json").write_text(json.dumps(content, indent=1) + "\n")
                (temporary / "config.toml").write_text(config_toml)
                if tokenizer:
                    (temporary / _TOKENIZER).mkdir()
                for name, file in (tokenizer or {}).items():
                    (temporary / _TOKENIZER / name).write_bytes(file)
                return list(relative_files(temporary))

        names = processes.first_does(add_the_rest)

        def look_at_some() -> dict[str, list[Any]]:
            with self._explaining(step, temporary):
                share = names[processes.index :: processes.count]
                return {name: list(sync_and_digest(temporary / name)) for name in share}

        # On a pod reading all of it would keep process 0 busy for minutes.
        found = {name: facts for share in processes.all_do(look_at_some) for name, facts in share.items()}

        def finish() -> None:
            with self._explaining(step, temporary):
                files = {name: found[name] for name in names}
                manifest = json.dumps({"format": _FORMAT, "files": files}, indent=1) + "\n"
                atomic_write(temporary / "manifest.json", manifest.encode())
                for root, _, _ in os.walk(temporary):
                    fsync_folder(Path(root))
                go_on()
                replaced = self.folder / f"{temporary.name}-old"
                if final.exists():
                    os.rename(final, replaced)
                try:
                    os.rename(temporary, final)
                except OSError:
                    if replaced.exists():
                        os.rename(replaced, final)
                    raise
                fsync_folder(self.folder)
                shutil.rmtree(replaced, ignore_errors=True)
            if best:
                self.mark_best(step)
            self._prune()

        processes.first_does(finish)
        return Checkpoint(final, step, content)

    @contextmanager
    def _explaining(self, step: int, temporary: Path) -> Iterator[None]:
        """A save that fails leaves nothing behind, and says which failure of the disk it was."""
        try:
            yield
        except Exception as error:
            if Processes.here().first:  # others may still be writing there
                shutil.rmtree(temporary, ignore_errors=True)
            if (reason := storage_reason(error)) is None:
                raise
            kept = self.steps()
            remains = (
                f"The checkpoint of step {kept[-1]} is intact" if kept else "There is no earlier checkpoint"
            )
            raise CheckpointWriteError(
                f"could not write the checkpoint of step {step} to {str(self.folder)!r}: {reason}. "
                f"{remains}. Free some space (or lower checkpoint.keep) and run the same command again."
            ) from error

    def mark_best(self, step: int) -> None:
        """Let the link ``best`` point to the checkpoint of a step, which is kept from then on.

        Raises:
          CheckpointWriteError: there is something else of that name, or the file system has no links.
        """
        mark, link = self.folder / _BEST, self.folder / f"{_TEMPORARY}{_BEST}-{os.getpid()}"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(str(step), target_is_directory=True)
            os.replace(link, mark)
            fsync_folder(self.folder)
        except OSError as error:
            link.unlink(missing_ok=True)
            raise CheckpointWriteError(
                f"the checkpoint of step {step} is written, but {str(mark)!r} cannot point to it: {error.strerror}. "
                "Move away what has that name, or pass checkpoint.keep_best=false (as on a file system without links)."
            ) from error

    def best_step(self) -> int | None:
        """The step of the checkpoint that is marked as the best; None if none is, or it is not there any more."""
        try:
            name = os.readlink(self.folder / _BEST)
        except OSError:
            return None
        return int(name) if name.isdecimal() and int(name) in self.steps() else None

    def clean(self) -> None:
        """Remove leftovers of interrupted saves. Only the holder of the run's lock may call this."""
        for link in self.folder.glob(f"{_TEMPORARY}{_BEST}-*"):
            _unlink_link(link)
        for path in self._entries(_TEMPORARY):
            # It was moved away for another one of the same step, which did not get its name.
            if (old := _REPLACED.fullmatch(path.name)) and not (self.folder / old[1]).exists():
                os.rename(path, self.folder / old[1])
            shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, *, after: int) -> None:
        """Rename the checkpoints of later steps, which are damaged and were skipped."""
        for step in self.steps():
            if step > after:
                aside = self.folder / f"{_DAMAGED}{step}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.folder / str(step), aside)

    def clear(self) -> None:
        """Remove every checkpoint of the run."""
        for path in [*self._entries(_TEMPORARY), *self._entries(_DAMAGED)]:
            shutil.rmtree(path, ignore_errors=True)
        _unlink_link(self.folder / _BEST)
        for step in reversed(self.steps()):
            shutil.rmtree(self.folder / str(step))

    def _entries(self, prefix: str) -> list[Path]:
        return [path for path in self.folder.glob(f"{prefix}*") if path.is_dir() and not path.is_symlink()]

    def _prune(self) -> None:
        best = self.best_step()
        for step in self.steps()[: -self.keep]:
            if step == best or (self.keep_every and step % self.keep_every == 0):
                continue
            # Away from its name first: a kill in the middle of the removal leaves no half checkpoint.
            doomed = self.folder / f"{_TEMPORARY}old-{step}"
            os.rename(self.folder / str(step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _unlink_link(path: Path) -> None:
    """Remove a link; anything else of that name is not ours."""
    if path.is_symlink():
        path.unlink(missing_ok=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by its folder after comparing every file with the manifest.

    Raises:
      CheckpointNotFoundError: there is no such folder.
      CheckpointDamagedError: a file is missing, added, truncated or changed.
    """
    if not path.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint at {str(path)!r}.")
    try:
        manifest = read_json(path / "manifest.json")
        recorded = manifest["files"]
        # Nothing has its digest: all that it says has to be what is expected.
        if manifest != {"format": _FORMAT, "files": recorded}:
            raise ValueError(
                f"manifest.json is of format {manifest.get('format')!r:.40}, this version reads {_FORMAT}"
            )
        present = set(relative_files(path)) - {"manifest.json"}
        if not isinstance(recorded, dict):
            raise ValueError("the manifest lists no files")
        if strays := present ^ set(recorded):
            name = min(strays)
            raise ValueError(f"{name!r} is {'not in the manifest' if name in present else 'missing'}")
        for name, (size, digest) in recorded.items():
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name!r} has {found:,} bytes instead of {size:,}")
            if digest_of(path / name) != digest:
                raise ValueError(f"{name!r} has other content than was written")
        meta = read_json(path / "meta.json")
        if meta.get("format") != _FORMAT or not isinstance(meta.get("step"), int):
            raise ValueError(f"meta.json is of format {meta.get('format')!r}, this version reads {_FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"the checkpoint {str(path)!r} is damaged: {first_line(error)}."
        ) from error
    return Checkpoint(path, meta["step"], meta)


def _check_space(folder: Path, items: Mapping[str, Any]) -> None:
    """Fail before anything is written if the arrays, uncompressed, do not fit on the disk."""
    import jax

    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(dict(items)) if hasattr(leaf, "nbytes"))
    free = shutil.disk_usage(folder).free
    if free < needed:
        text = f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes are needed, {free:,} are free)"
        raise OSError(errno.ENOSPC, text)


def _write_item(path: Path, tree: Any, processes: Processes) -> None:
    ocp = extras.orbax()
    options = processes.orbax_options(path)
    # The synchronous one: after a failed save the asynchronous one can not save again in this process.
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree))
