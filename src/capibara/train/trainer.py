"""A training run from a configuration: start or resume, run the loop, and write a self-contained folder.

::

    runs/demo/
      config.toml      the settings of the newest run in it
      checkpoints/     see capibara.train.checkpoint
      metrics.jsonl    every loss, every validation; see capibara.train.metrics
      loss.png         a plot of them
      lock             held while a run writes here

Resuming is exact: on one device, a run that was killed and continued has bit for bit the same losses as an
uninterrupted one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from jax.errors import JaxRuntimeError

from capibara.config import ModularModelConfig
from capibara.data import PackedBatches, PairedBatches
from capibara.errors import ConfigError
from capibara.hardware import detect_chip
from capibara.launch import may_be_fewer
from capibara.train import extras
from capibara.train.checkpoint import Checkpoint, CheckpointStore
from capibara.train.errors import CheckpointDamagedError, CorruptionError, DivergedError, ResumeMismatchError
from capibara.train.finite import check_finite, not_finite
from capibara.train.held import HeldCopies
from capibara.train.ledger import LEDGER, Ledger
from capibara.train.loop import Loop, Utilisation
from capibara.train.metrics import MetricsLog, SilentLog, read_losses
from capibara.train.options import flags_note
from capibara.train.pipelines import pipeline_notes
from capibara.train.plot import plot_losses
from capibara.train.preferences import REFERENCE, reference_digest, set_reference
from capibara.train.processes import Processes
from capibara.train.progress import Reporter, SilentReporter, duration
from capibara.train.protocols import DataSource, Model, Optimizer
from capibara.train.recovery.guard import Guard
from capibara.train.recovery.rollback import Rollback
from capibara.train.recovery.skips import Skips
from capibara.train.recovery.watchdog import Watchdog
from capibara.train.report import TrainReport
from capibara.train.resume import check_resumable, seek_data
from capibara.train.run import Run
from capibara.train.rundir import atomic_write, lock_run, remove_leftovers
from capibara.train.saved import Facts, described_items, items_of, restore_state, state_of
from capibara.train.saves import Saves
from capibara.train.scaling.moves import Moves
from capibara.train.signals import StopFlag
from capibara.train.state import TrainState
from capibara.train.tensorboard import EventFiles

__all__ = ["Origin", "TrainReport", "checkpoint_store", "train"]


@dataclass(frozen=True)
class Origin:
    """Where a run's first parameters come from.

    Attributes:
      load: gives them, nested as the model's, for the model as it is placed on the run's devices.
      record: afterwards: plain values for checkpoints that say where the model came from; None: nothing to say.
    """

    load: Callable[[Any], Any]
    record: Callable[[], Any]


def checkpoint_store(directory: str | Path, *, keep: int = 2, keep_every: int = 0) -> CheckpointStore:
    """The checkpoints of the run in ``directory``."""
    return CheckpointStore(Path(directory) / "checkpoints", keep=keep, keep_every=keep_every)


def train(
    config: ModularModelConfig,
    model: Model,
    corpus: DataSource,
    *,
    fresh: bool = False,
    allow_new_text: bool = False,
    reporter: Reporter | None = None,
    stop: StopFlag | None = None,
    devices: Sequence[Any] | None = None,
    measure_utilisation: bool = True,
    origin: Origin | None = None,
    optimizer: Optimizer | None = None,
    elastic: bool | None = None,
) -> TrainReport:
    """Train ``model`` on ``corpus`` according to ``config``, in the folder ``config.checkpoint.directory``.

    Args:
      config: a :class:`capibara.config.ModularModelConfig`.
      model: a :class:`capibara.core.ModularCapibaraModel`, or any other :class:`capibara.train.protocols.Model`.
      corpus: the text, or any other :class:`capibara.train.protocols.DataSource`.
      fresh: remove an earlier run in the folder and start over; ``checkpoint.resume = false`` means
      the same.
      allow_new_text: continue a run on different text.
      reporter: receives progress; silent by default.
      stop: polled between steps; see :func:`capibara.train.signals.stop_on_signals`.
      devices: devices to train on, by default all local ones. With ``tpu.enabled`` the mesh of ``[tpu]`` uses the
        first of them; the state is sharded over it according to those settings.
      measure_utilisation: measure the matrix-multiply rate first.
      origin: a published model, whose parameters a new run begins with; by default they are drawn.
      optimizer: an ``optax.GradientTransformation`` in place of the one of the settings; a resumed run needs the same.
      elastic: with fewer devices than the mesh of ``[tpu]`` has, train on a smaller one; by default only if the
        launcher may have started fewer processes (``capibara launch --min-processes``).

    Raises:
      MissingExtraError: a package of the extra ``train`` is not installed.
      ResumeMismatchError: the folder contains a run of another model, or on other text.
      CheckpointDamagedError: the folder contains checkpoints, but every one is damaged.
      RunLockedError: another process is training there.
      CheckpointWriteError, RunWriteError: something could not be written.
      DivergedError: the loss became infinite or not a number.
      DataError: the text is too short for one sequence.
      ConfigError: settings that do not match the text or this process: a vocabulary too small, float64 without JAX's
        64-bit mode, more devices than available.
    """
    extras.require()
    if config.train.tensorboard:
        extras.tensorboard()
    processes = Processes.here()
    if reporter is None or not processes.first:
        reporter = SilentReporter()
    folder = Path(config.checkpoint.directory)
    if elastic is None:
        elastic = may_be_fewer(os.environ)
    run = Run.build(config, model, corpus, devices, optimizer, elastic=elastic)
    kept = config.checkpoint
    store = checkpoint_store(folder, keep=kept.keep, keep_every=kept.keep_every)
    with contextlib.ExitStack() as stack:

        def take_folder() -> None:
            stack.enter_context(lock_run(folder))
            store.clean()
            remove_leftovers(folder)
            if fresh or not config.checkpoint.resume:
                store.clear()
                for name in ("metrics.jsonl", "loss.png", LEDGER, REFERENCE):
                    (folder / name).unlink(missing_ok=True)
                shutil.rmtree(folder / "tensorboard", ignore_errors=True)

        processes.first_does(take_folder)
        ledger = stack.enter_context(Ledger(folder / LEDGER if processes.first else None, warn=reporter.warn))
        processes.check_shared(folder)
        checkpoint = _newest(store, processes, reporter)
        facts = Facts()
        saved = 0 if checkpoint is None else checkpoint.step
        held = HeldCopies.of_launcher(config, corpus.fingerprint, note=reporter.note, warn=reporter.warn)
        if held is not None and (fresh or not config.checkpoint.resume):
            held.clear()
        copied = None if held is None else held.newest(described_items(run.state))

        def first_state(run: Run) -> TrainState:
            return run.initial_state(None if origin is None else origin.load(run.model))

        if held is not None and copied is not None and copied.step > saved:
            facts, start = Facts.of(copied), copied.step
            processes.first_does(lambda: store.set_aside(after=saved))
            state = state_of(held.restore(start, described_items(run.state)), run.state)
            if isinstance(run.batches, PackedBatches):
                run.batches.seek(Skips(facts.skipped or ()).number(start), facts.position or {})
            reporter.note(f"resuming after step {start:,} from the copy in the launcher's memory")
        elif checkpoint is None:
            if origin is None and config.finetune.base != "none":
                raise ConfigError(
                    f"finetune.base={config.finetune.base!r} stores the weights of a trained model in fewer bits: "
                    "name it (--model, origin=)"
                )
            state, start = first_state(run), 0
            facts = Facts(seconds=0.0, pretrained=None if origin is None else origin.record())
        else:
            if checkpoint.is_import:
                raise ResumeMismatchError(
                    f"{str(folder)!r} holds an imported model, which training does not overwrite. Pass "
                    f"--model {folder}, and another folder with --directory."
                )
            facts = Facts.of(checkpoint)
            check_resumable(config, corpus, checkpoint, facts, reporter, allow_new_text=allow_new_text)
            start, seconds = checkpoint.step, facts.trained(checkpoint)
            processes.first_does(lambda: store.set_aside(after=start))
            limit = config.train.max_seconds
            if start >= config.train.steps or (limit is not None and seconds >= limit):
                return _already_trained(run, checkpoint, seconds, reporter)
            state = restore_state(checkpoint, run.state)
            if facts.fingerprint != corpus.fingerprint:
                facts = replace(facts, skipped=None)  # numbers of other batches
            number = Skips(facts.skipped or ()).number(start)
            seek_data(run.batches, corpus, config, checkpoint, facts, number)
            reporter.note(f"resuming after step {start:,} from {checkpoint.path}")
        new = checkpoint is None and start == 0
        set_reference(run, state, folder, new=new, digest=facts.reference, reporter=reporter)
        processes.first_does(lambda: atomic_write(folder / "config.toml", config.to_toml().encode()))
        utilisation = None
        if measure_utilisation and processes.first:
            utilisation = _measure(run)
            reporter.note(f"a matrix multiply here reaches {utilisation.device_flops / 1e9:,.0f} GFLOP/s")
            reporter.note(_forecast(run, utilisation, start))
        report = _run(
            run,
            store,
            first_state,
            state,
            (start, saved),
            facts,
            utilisation,
            reporter,
            stop or StopFlag(),
            held,
            ledger,
        )
        if held is not None:
            held.clear()
        return report


def _newest(store: CheckpointStore, processes: Processes, reporter: Reporter) -> Checkpoint | None:
    """The newest intact checkpoint. Process 0 compares the files with their checksums, for all."""

    def look() -> list[Any] | None:
        found = store.newest(warn=reporter.warn)
        return None if found is None else [found.step, dict(found.meta)]

    found = processes.first_does(look)
    return None if found is None else Checkpoint(store.folder / str(found[0]), *found)


# Training reaches about this part of the rate of a matrix multiply.
_USUAL_UTILISATION = (0.35, 0.75)


def _forecast(run: Run, utilisation: Utilisation, start: int) -> str:
    """What is about to happen, and how long it takes if training is as fast as it usually is."""
    steps, tokens = run.config.train.steps - start, run.batches.batch_size * run.batches.sequence_length
    least, most = (
        steps * tokens / (part * utilisation.device_flops / utilisation.flops_per_token)
        for part in reversed(_USUAL_UTILISATION)
    )
    return (
        f"training {steps:,} steps of {tokens:,} tokens: {duration(least)} to {duration(most)} expected. "
        "Ctrl-C stops it; the same command continues"
    )


def _run(
    run: Run,
    store: CheckpointStore,
    first_state: Callable[[Run], TrainState],
    state: TrainState,
    begin: tuple[int, int],
    facts: Facts,
    utilisation: Utilisation | None,
    reporter: Reporter,
    stop: StopFlag,
    held: HeldCopies | None,
    ledger: Ledger,
) -> TrainReport:
    config, data, folder, processes = run.config, run.source, store.folder.parent, Processes.here()
    start, saved = begin
    num_params = int(run.model.num_params)
    config_toml = config.to_toml()
    recovery = config.recovery
    skips = Skips(facts.skipped or ())
    rollback = Rollback(skips, max_skips=recovery.max_skips, reporter=reporter)

    def now(step: int, seconds: float, validation: float | None) -> dict[str, Any]:
        batches = run.batches
        return Facts(
            seconds=seconds,
            validation=validation,
            text=data.name,
            fingerprint=data.fingerprint,
            position=batches.position(skips.number(step)) if isinstance(batches, PackedBatches) else None,
            reference=reference_digest(folder) if isinstance(batches, PairedBatches) else None,
            skipped=list(skips.before(step)) or None,
            pretrained=facts.pretrained,
        ).to_meta()

    @functools.cache
    def infinite_from_the_start() -> frozenset[str]:
        return frozenset(not_finite(items_of(first_state(run))))

    def save(state: TrainState, step: int, seconds: float, validation: float | None, best: bool) -> None:
        items = items_of(state)
        check_finite(step, items, infinite_from_the_start)
        saves.save(
            step,
            items,
            meta=now(step, seconds, validation),
            config_toml=config_toml,
            tokenizer=data.tokenizer.files,
            best=best,
        )

    def remember(state: TrainState, step: int, seconds: float) -> None:
        assert held is not None
        items = items_of(state)
        check_finite(step, items, infinite_from_the_start)
        held.remember(step, items, now(step, seconds, None))

    def after_evaluation(step: int, bits: float) -> None:
        reporter.note(f"step {step}: validation {bits:.4f} bits per byte")
        if not processes.first:
            return
        title = f"{data.name}, {num_params:,} parameters"
        plot_losses(folder / "metrics.jsonl", folder / "loss.png", title=title)

    if config.tpu.enabled and (note := flags_note(config.tpu.flags, run.placement)):
        reporter.note(note)
    for note in pipeline_notes(run.placement.layout):
        reporter.note(note)
    begun = time.perf_counter()
    # Compiled ahead, so that compilation is neither in the step times nor in train.max_seconds.
    moves = Moves.of(run, processes, reporter)
    ledger.begin(start, devices=len(run.placement.devices), chip=detect_chip(run.placement.devices[0]).name)
    with ledger.during("compile"):
        train_step, eval_step = moves.compiled(run, state, skips.number(start))
    compile_seconds = time.perf_counter() - begun
    reporter.note(f"compiled training and validation in {compile_seconds:.1f} s")
    reporter.start(start, config.train.steps)
    seconds, first = facts.seconds or 0.0, start
    # Of the other processes nothing is shown, but that one is stuck goes to its standard error.
    warn = reporter.warn if processes.first else None
    watchdog = Watchdog(recovery.stuck_seconds, end=recovery.exit_when_stuck, warn=warn)
    saves = Saves(
        store,
        asynchronous=config.checkpoint.asynchronous,
        slow_seconds=config.checkpoint.slow_seconds,
        wait_seconds=config.checkpoint.wait_seconds,
        warn=reporter.warn,
        # It says itself where a save hangs, and ends the wait.
        tick=lambda: watchdog.beat("a checkpoint was written", "checkpoint"),
    )
    try:
        while True:
            best = None
            if config.checkpoint.keep_best:
                saves.settle()  # it may be the best
                best = processes.first_does(lambda: _mark_best(store, data))
            with _log(config, folder, start) if processes.first else SilentLog() as log, watchdog:
                loop = Loop(
                    run=run,
                    train_step=train_step,
                    eval_step=eval_step,
                    log=log,
                    save=save,
                    saves=saves,
                    after_evaluation=after_evaluation,
                    reporter=reporter,
                    stop=stop,
                    guard=_guard(config, folder, processes),
                    skips=skips,
                    watchdog=watchdog,
                    sound=rollback.sound,
                    ledger=ledger,
                    remember=None if held is None else remember,
                    scaling=moves.controller,
                    utilisation=utilisation,
                    seconds_before=seconds,
                    best_bits=best,
                )
                try:
                    with ledger.during("step"):
                        state, step = loop.run_steps(state, start, saved)
                    if loop.reason != "moves":
                        break
                    failure = None
                except (DivergedError, CorruptionError, JaxRuntimeError) as error:
                    if isinstance(error, JaxRuntimeError) and not moves.takes_failures:
                        raise
                    # Time is spent, whatever came of it. The frames of the traceback hold the state, for which there
                    # may be no room beside the one that is read.
                    step, failure = -1, error.with_traceback(None)
            seconds, saved, before = loop.seconds, loop.saved, len(run.placement.devices)
            moving: TrainState | None = None
            if failure is None:  # to other devices, with the next step
                if processes.count > 1 and step > saved:
                    save(state, step, seconds, None, False)
                run = moves.to(run)
                start, moving = step, moves.carry(state, run)
            del state, loop
            if held is not None:
                held.clear()  # copies of the devices before, or of steps that do not count any more
            if moving is None:
                saves.settle_before_going_back()  # what is being written is the newest once it is complete
                checkpoint = _newest(store, processes, reporter)
                start = saved = 0 if checkpoint is None else checkpoint.step
                ledger.back(start)
                if isinstance(failure, JaxRuntimeError):
                    run = moves.after(cast(RuntimeError, failure), run, start)
                elif failure is not None:
                    rollback.after(failure, start)
                moving = first_state(run) if checkpoint is None else restore_state(checkpoint, run.state)
            state = moving
            del moving
            if moves.just_moved():
                utilisation = utilisation and utilisation.on(run.placement.devices, before)
                ledger.moved(len(run.placement.devices))
                with ledger.during("compile"):
                    train_step, eval_step = moves.compiled(run, state, skips.number(start))
    except BaseException as error:
        saves.leave(error)
        if held is not None:
            held.settle()
        raise
    finally:
        reporter.close()
    rate = loop.total.rate or None
    return TrainReport(
        reason=loop.reason,
        directory=str(folder),
        step=step,
        start_step=first,
        loss=loop.last_loss,
        validation_bits_per_byte=loop.last_bits,
        tokens_per_second=rate,
        utilisation=None if utilisation is None or rate is None else utilisation.of(rate),
        matmul_flops=None if utilisation is None else utilisation.device_flops,
        seconds=loop.seconds,
        compile_seconds=compile_seconds,
        num_params=num_params,
        devices=len(run.placement.devices),
        signal=stop.signal,
        unit="pair" if isinstance(run.batches, PairedBatches) else data.unit,
    )


def _log(config: ModularModelConfig, folder: Path, start: int) -> MetricsLog:
    """What the run writes besides checkpoints."""
    events = EventFiles(folder / "tensorboard", resume_step=start) if config.train.tensorboard else None
    return MetricsLog(folder / "metrics.jsonl", resume_step=start, events=events)


def _guard(config: ModularModelConfig, folder: Path, processes: Processes) -> Guard:
    """What looks at the losses, which knows those up to the newest checkpoint."""
    recovery = config.recovery
    guard = Guard(
        learning_rate=config.optimizer.learning_rate,
        sigmas=recovery.spike_sigmas,
        window=recovery.spike_window,
    )
    if recovery.spike_sigmas:

        def recent() -> list[float]:
            losses = read_losses(folder / "metrics.jsonl")
            return [losses[step] for step in sorted(losses)[-recovery.spike_window :]]

        guard.know(processes.first_does(recent))
    return guard


def _mark_best(store: CheckpointStore, data: DataSource) -> float | None:
    """Bits of the best checkpoint that was validated with the same text, and a link to it.

    A kill between a checkpoint and its link would else lose it: what is not marked is removed some steps later.
    """
    found: dict[float, int] = {}
    for step in store.steps():
        try:
            facts = Facts.of(store.open(step))
        except CheckpointDamagedError:
            continue
        if facts.validation is not None and facts.fingerprint == data.fingerprint:
            found.setdefault(facts.validation, step)
    if not found:
        return None
    if store.best_step() != found[min(found)]:
        store.mark_best(found[min(found)])
    return min(found)


def _measure(run: Run) -> Utilisation:
    from capibara.measure import matmul_rate

    config, devices = run.config, run.placement.devices
    rate = float(matmul_rate(dtype=config.precision.compute_dtype))
    flops = float(run.model.flops_per_token(config.train.sequence_length, training=True))
    return Utilisation(flops, rate).on(devices, 1)


def _already_trained(run: Run, checkpoint: Checkpoint, seconds: float, reporter: Reporter) -> TrainReport:
    step, settings = checkpoint.step, run.config.train
    if step >= settings.steps:
        remedy = f"train.steps={2 * step} to train on"
    else:
        limit = settings.max_seconds
        remedy = f"train.max_seconds={2 * seconds:.0f} to train on (its {limit:g} s are used up)"
    reporter.note(f"already trained {step:,} steps; pass {remedy}, or --fresh to start over")
    return TrainReport(
        reason="already trained",
        directory=str(run.config.checkpoint.directory),
        step=step,
        start_step=step,
        loss=None,
        validation_bits_per_byte=None,
        tokens_per_second=None,
        utilisation=None,
        matmul_flops=None,
        seconds=seconds,
        compile_seconds=0.0,
        num_params=int(run.model.num_params),
        devices=len(run.placement.devices),
        unit=run.source.unit,
    )
