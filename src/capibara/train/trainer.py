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

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.errors import ConfigError
from capibara.train import extras
from capibara.train.batches import BatchSampler, validation_batches
from capibara.train.checkpoint import SOURCE, Checkpoint, CheckpointStore
from capibara.train.data import Corpus
from capibara.train.errors import ResumeMismatchError
from capibara.train.float64 import check_float64
from capibara.train.loop import Loop, Utilisation
from capibara.train.metrics import MetricsLog
from capibara.train.optimizer import build_optimizer, learning_rate_schedule
from capibara.train.placement import Placement
from capibara.train.plot import plot_losses
from capibara.train.progress import Reporter, SilentReporter, duration
from capibara.train.resume import check_resumable, restore_state, seconds_trained
from capibara.train.rundir import atomic_write, lock_run, remove_leftovers
from capibara.train.signals import StopFlag
from capibara.train.state import TrainState
from capibara.train.step import make_eval_step, make_train_step

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


@dataclass(frozen=True)
class TrainReport:
    """The result of a run.

    Attributes:
      reason: "finished" (all steps), "time" (``train.max_seconds``), "interrupted" (a signal) or "already
      trained".
      step: optimizer steps taken in the whole run.
      start_step: steps that were already taken when this process began.
      loss: training loss of the last step in nats per token, None if no step was run.
      validation_bits_per_byte: on the held-out text at the end; None if not measured.
      tokens_per_second: mean over the steps of this process, without compilation, validation and checkpoints.
      utilisation: that rate times the model's FLOP per token, over ``matmul_flops``.
      matmul_flops: FLOP/s of a matrix multiply, measured at the start.
      seconds: training time of the whole run; compile_seconds: what this process compiled before.
      num_params: parameters of the model; devices: number of devices used.
      unit: what a token is, "byte" or "token".
    """

    reason: str
    directory: str
    step: int
    start_step: int
    loss: float | None
    validation_bits_per_byte: float | None
    tokens_per_second: float | None
    utilisation: float | None
    matmul_flops: float | None
    seconds: float
    compile_seconds: float
    num_params: int
    devices: int
    signal: int | None = None
    unit: str = "byte"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        words = {"time": "reached train.max_seconds", "already trained": "already trained"}
        reason = words.get(self.reason, self.reason)
        lines = [f"{reason}: {self.step:,} steps in {self.seconds:,.1f} s of training"]
        if self.loss is not None:
            lines.append(f"training loss      {self.loss:.4f} nats per {self.unit} (last step)")
        if self.validation_bits_per_byte is not None:
            lines.append(f"validation         {self.validation_bits_per_byte:.4f} bits per byte")
        if self.tokens_per_second is not None:
            where = f"{self.devices} device{'' if self.devices == 1 else 's'}"
            lines.append(f"speed              {self.tokens_per_second:,.0f} tokens/s on {where}")
        if self.utilisation is not None and self.matmul_flops is not None:
            rate = f"{self.matmul_flops / 1e9:,.0f} GFLOP/s"
            lines.append(f"utilisation        {self.utilisation:.1%} of a matrix multiply's {rate}")
        lines.append(f"written to         {self.directory} (checkpoints, metrics.jsonl, loss.png)")
        return "\n".join(lines)


def checkpoint_store(directory: str | Path, *, keep: int = 2) -> CheckpointStore:
    """The checkpoints of the run in ``directory``."""
    return CheckpointStore(Path(directory) / "checkpoints", keep=keep)


def train(
    config: Any,
    model: Any,
    corpus: Corpus,
    *,
    fresh: bool = False,
    allow_new_text: bool = False,
    reporter: Reporter | None = None,
    stop: StopFlag | None = None,
    devices: Sequence[Any] | None = None,
    measure_utilisation: bool = True,
    origin: Origin | None = None,
) -> TrainReport:
    """Train ``model`` on ``corpus`` according to ``config``, in the folder ``config.checkpoint.directory``.

    Args:
      config: a :class:`capibara.config.ModularModelConfig`.
      model: anything with ``init(seed)``, ``loss``, ``flops_per_token`` and ``num_params`` like
        :class:`capibara.core.ModularCapibaraModel`.
      corpus: the text.
      fresh: remove an earlier run in the folder and start over; ``checkpoint.resume = false`` means
      the same.
      allow_new_text: continue a run on different text.
      reporter: receives progress; silent by default.
      stop: polled between steps; see :func:`capibara.train.signals.stop_on_signals`.
      devices: devices to train on, by default all local ones. With ``tpu.enabled`` the mesh of ``[tpu]`` uses the
        first of them; the state is sharded over it according to those settings.
      measure_utilisation: measure the matrix-multiply rate first.
      origin: a published model, whose parameters a new run begins with; by default they are drawn.

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
    reporter = reporter or SilentReporter()
    folder = Path(config.checkpoint.directory)
    setup = _Setup.build(config, model, corpus, devices)
    with lock_run(folder):
        store = checkpoint_store(folder, keep=config.checkpoint.keep)
        store.clean()
        remove_leftovers(folder)
        if fresh or not config.checkpoint.resume:
            store.clear()
            for name in ("metrics.jsonl", "loss.png"):
                (folder / name).unlink(missing_ok=True)
        checkpoint = store.newest(warn=reporter.warn)
        source: Any = None
        if checkpoint is None:
            state, start, seconds = setup.initial_state(origin), 0, 0.0
            source = None if origin is None else origin.record()
        else:
            if checkpoint.is_import:
                raise ResumeMismatchError(
                    f"{str(folder)!r} holds an imported model, which training does not overwrite. Pass "
                    f"--model {folder}, and another folder with --directory."
                )
            source = checkpoint.meta.get(SOURCE)
            check_resumable(config, corpus, checkpoint, reporter, allow_new_text=allow_new_text)
            store.set_aside(after=checkpoint.step)
            start, seconds = checkpoint.step, seconds_trained(checkpoint)
            limit = config.train.max_seconds
            if start >= config.train.steps or (limit is not None and seconds >= limit):
                return _already_trained(setup, checkpoint, seconds, reporter)
            state = setup.restore(checkpoint)
            reporter.note(f"resuming after step {start:,} from {checkpoint.path}")
        atomic_write(folder / "config.toml", config.to_toml().encode())
        utilisation = None
        if measure_utilisation:
            utilisation = _measure(setup)
            reporter.note(f"a matrix multiply here reaches {utilisation.device_flops / 1e9:,.0f} GFLOP/s")
            reporter.note(_forecast(setup, utilisation, start))
        return _run(setup, store, state, start, seconds, source, utilisation, reporter, stop or StopFlag())


# Training reaches about this part of the rate of a matrix multiply.
_USUAL_UTILISATION = (0.35, 0.75)


def _forecast(setup: _Setup, utilisation: Utilisation, start: int) -> str:
    """What is about to happen, and how long it takes if training is as fast as it usually is."""
    steps, tokens = setup.config.train.steps - start, setup.sampler.batch_size * setup.sampler.sequence_length
    least, most = (
        steps * tokens / (part * utilisation.device_flops / utilisation.flops_per_token)
        for part in reversed(_USUAL_UTILISATION)
    )
    return (
        f"training {steps:,} steps of {tokens:,} tokens: {duration(least)} to {duration(most)} expected. "
        "Ctrl-C stops it; the same command continues"
    )


@dataclass(frozen=True)
class _Setup:
    """What follows from configuration, model and text alone, before any folder is looked at."""

    config: Any
    model: Any
    corpus: Corpus
    sampler: BatchSampler
    validation: list[np.ndarray]
    schedule: Callable[[Any], Any]
    optimizer: Any
    placement: Placement

    @classmethod
    def build(cls, config: Any, model: Any, corpus: Corpus, devices: Sequence[Any] | None) -> _Setup:
        check_float64(config, "training")
        placement = Placement.of(config, devices)
        _check_vocabulary(config, corpus)
        settings = config.train
        validation = []
        if corpus.validation.size:
            validation = validation_batches(
                corpus.validation,
                batch_size=settings.batch_size,
                sequence_length=settings.sequence_length,
                max_batches=settings.eval_batches,
            )
        # A model that can be compiled for the mesh runs its kernels on each device's part.
        if placement.mesh is not None and hasattr(model, "on_mesh"):
            model = model.on_mesh(placement.mesh, placement.rules)
        return cls(
            config,
            model,
            corpus,
            BatchSampler(corpus.train, settings.batch_size, settings.sequence_length, settings.seed),
            placement.cut(validation, settings.batch_size),
            learning_rate_schedule(config),
            build_optimizer(config, param_axes=getattr(model, "param_axes", None)),
            placement,
        )

    @cached_property
    def state(self) -> TrainState:
        """The state as shapes with shardings."""
        return self.placement.describe_state(self.model, self.optimizer)

    @property
    def shardings(self) -> TrainState | None:
        """Of the state, where a layout fixes them."""
        if self.placement.layout is None:
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def initial_state(self, origin: Origin | None) -> TrainState:
        params = None if origin is None else origin.load(self.model)
        return self.placement.make_state(
            self.model, self.optimizer, seed=self.config.train.seed, params=params
        )

    def restore(self, checkpoint: Checkpoint) -> TrainState:
        return restore_state(checkpoint, self.state)


def _run(
    setup: _Setup,
    store: CheckpointStore,
    state: TrainState,
    start: int,
    seconds: float,
    source: Any,
    utilisation: Utilisation | None,
    reporter: Reporter,
    stop: StopFlag,
) -> TrainReport:
    config, corpus, folder = setup.config, setup.corpus, store.folder.parent
    num_params = int(setup.model.num_params)
    config_toml = config.to_toml()

    def save(state: TrainState, step: int, seconds: float) -> None:
        items = {
            "model": {"params": state.params, "state": state.model_state},
            "training": {
                "opt_state": state.opt_state,
                "step": state.step,
                "key": jax.random.key_data(state.key),
            },
        }
        meta = {"seconds": seconds, "text": corpus.name, "fingerprint": corpus.fingerprint}
        if source is not None:
            meta[SOURCE] = source
        store.save(step, items, meta=meta, config_toml=config_toml, tokenizer=corpus.tokenizer.files)

    def after_evaluation(step: int, bits: float) -> None:
        reporter.note(f"step {step}: validation {bits:.4f} bits per byte")
        title = f"{corpus.name}, {num_params:,} parameters"
        plot_losses(folder / "metrics.jsonl", folder / "loss.png", title=title)

    train_step = make_train_step(
        setup.model, setup.optimizer, schedule=setup.schedule, shardings=setup.shardings
    )
    eval_step = make_eval_step(setup.model)
    with MetricsLog(folder / "metrics.jsonl", resume_step=start) as log:
        loop = Loop(
            config=config,
            placement=setup.placement,
            sampler=setup.sampler,
            train_step=train_step,
            eval_step=eval_step,
            validation=setup.validation,
            log=log,
            save=save,
            after_evaluation=after_evaluation,
            reporter=reporter,
            stop=stop,
            utilisation=utilisation,
            bytes_per_token=corpus.bytes_per_token,
            seconds_before=seconds,
        )
        options = setup.placement.compiler_options or None
        if config.tpu.enabled and config.tpu.flags and options is None:
            platform = setup.placement.devices[0].platform
            reporter.note(f"tpu.flags are options of a TPU's compiler: left out on {platform}")
        begun = time.perf_counter()
        # Compiled ahead, so that compilation is neither in the step times nor in train.max_seconds.
        loop.train_step = train_step.lower(state, loop.put_batch(start)).compile(options)
        if setup.validation:
            batch = setup.placement.put_batch(setup.validation[0])
            loop.eval_step = eval_step.lower(state.params, state.model_state, batch).compile(options)
        compile_seconds = time.perf_counter() - begun
        reporter.note(f"compiled training and validation in {compile_seconds:.1f} s")
        reporter.start(start, config.train.steps)
        try:
            state, step = loop.run(state, start)
        finally:
            reporter.close()
    rate = loop.total.rate or None
    return TrainReport(
        reason=loop.reason,
        directory=str(folder),
        step=step,
        start_step=start,
        loss=loop.last_loss,
        validation_bits_per_byte=loop.last_bits,
        tokens_per_second=rate,
        utilisation=None if utilisation is None or rate is None else utilisation.of(rate),
        matmul_flops=None if utilisation is None else utilisation.device_flops,
        seconds=loop.seconds,
        compile_seconds=compile_seconds,
        num_params=num_params,
        devices=len(setup.placement.devices),
        signal=stop.signal,
        unit=corpus.unit,
    )


def _measure(setup: _Setup) -> Utilisation:
    from capibara.measure import matmul_rate

    config, devices = setup.config, setup.placement.devices
    rate = float(matmul_rate(dtype=config.precision.compute_dtype))
    # Emulated CPU devices share the cores that the one measurement already used.
    count = 1 if devices[0].platform == "cpu" else len(devices)
    flops = float(setup.model.flops_per_token(config.train.sequence_length, training=True))
    return Utilisation(flops, rate * count)


def _already_trained(
    setup: _Setup, checkpoint: Checkpoint, seconds: float, reporter: Reporter
) -> TrainReport:
    step, settings = checkpoint.step, setup.config.train
    if step >= settings.steps:
        remedy = f"train.steps={2 * step} to train on"
    else:
        limit = settings.max_seconds
        remedy = f"train.max_seconds={2 * seconds:.0f} to train on (its {limit:g} s are used up)"
    reporter.note(f"already trained {step:,} steps; pass {remedy}, or --fresh to start over")
    return TrainReport(
        reason="already trained",
        directory=str(setup.config.checkpoint.directory),
        step=step,
        start_step=step,
        loss=None,
        validation_bits_per_byte=None,
        tokens_per_second=None,
        utilisation=None,
        matmul_flops=None,
        seconds=seconds,
        compile_seconds=0.0,
        num_params=int(setup.model.num_params),
        devices=len(setup.placement.devices),
        unit=setup.corpus.unit,
    )


def _check_vocabulary(config: Any, corpus: Corpus) -> None:
    highest = int(max(part.max() for part in (corpus.train, corpus.validation) if part.size))
    if highest >= config.model.vocab_size:
        needed = max(256, corpus.tokenizer.vocab_size)
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small for this text: it has the {corpus.unit} "
            f"{highest}. Use model.vocab_size={needed}, which holds every {corpus.unit}."
        )
