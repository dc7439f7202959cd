"""`ModularCapibaraModel`: a decoder language model with parameters, loss and decoding.

The model itself is a composed one (:mod:`capibara.core.decoder`); this class compiles it in two forms, for whole
sequences and for decoding with a cache, and provides common methods. Every method that takes ``params`` is pure and
works with ``jax.jit``, ``jax.grad`` and ``jax.vmap``.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from capibara.compose import CompiledModel, JaxBackend, Precision, compile
from capibara.compose.errors import InputError
from capibara.compose.physical.randomness import as_key
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core.adapters import adapter_mask, add_adapters, is_adapter, merge_adapters, only_adapters
from capibara.core.decoder import build_decoder
from capibara.core.flops import flops_per_token
from capibara.core.loss import next_token_loss, parts_of
from capibara.data import ByteTokenizer, FileTokenizer, Tokenizer, TokenizerError

if TYPE_CHECKING:
    import jax


__all__ = ["ModularCapibaraModel"]


class ModularCapibaraModel:
    """A decoder language model configured by TOML.

    Args:
        config: from ``ModularModelConfig.from_toml(…)``.
        mesh: a ``jax.sharding.Mesh`` over which parameters and activations are sharded. By default, with
            ``tpu.enabled`` and at least ``tpu.num_chips`` devices of the default platform, a mesh of
            ``tpu.topology``; otherwise none.
        platform: the platform to compile for, if it is not that of the available devices.
        rules: the mesh axes over which parameters and activations are sharded; by default ``AxisRules()``.

    Example::

        config = ModularModelConfig.from_toml("demo")
        model = ModularCapibaraModel(config)
        logits = model(tokens)                       # with the model's own parameters
        logits = model.apply(params, tokens)         # as a pure function
    """

    def __init__(
        self,
        config: ModularModelConfig,
        *,
        mesh: jax.sharding.Mesh | None = None,
        platform: str | None = None,
        rules: AxisRules | None = None,
    ) -> None:
        if not isinstance(config, ModularModelConfig):
            raise InputError(
                f"config is {type(config).__name__}, expected a ModularModelConfig: use "
                "ModularModelConfig.from_toml('demo') or a path"
            )
        self.config = config
        self.mesh = _mesh(config) if mesh is None else mesh
        p = config.precision
        policy = Precision(p.param_dtype, p.compute_dtype, p.accumulate_dtype)
        self.backend = JaxBackend(policy=policy, device_mesh=self.mesh, platform=platform, rules=rules)
        self.compiled: CompiledModel = compile(
            build_decoder(config.model, finetune=config.finetune), self.backend
        )
        # A capibara.families.Pretrained, of a room above this one, if the model was read from a published folder.
        self.pretrained: Any = None
        self.tokenizer_files: Mapping[str, bytes] = {}
        self._params: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None

    def on_mesh(self, mesh: jax.sharding.Mesh, rules: AxisRules | None = None) -> Self:
        """The same model for a mesh, without this one's parameters; the model itself if it already uses that mesh."""
        if mesh == self.mesh and (rules or AxisRules()) == self.backend.rules:
            return self
        return type(self)(self.config, mesh=mesh, rules=rules)

    @cached_property
    def decoder(self) -> CompiledModel:
        """The decoding form with a cache; compiled on first use."""
        return compile(
            build_decoder(self.config.model, cached=True, finetune=self.config.finetune), self.backend
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model came with; bytes if it is not a published one.

        Raises:
            TokenizerError: it was published without a ``tokenizer.json``, or with a damaged one.
            MissingExtraError: the package ``tokenizers`` is not installed.
        """
        if self.tokenizer_files:
            return FileTokenizer(self.tokenizer_files)
        if self.pretrained is not None:
            raise TokenizerError(
                "the model was published without a tokenizer.json. Use token ids (capibara.serve.Generator.tokens), or "
                "add tokenizer.json to its folder and import it again"
            )
        return ByteTokenizer()

    @cached_property
    def trunk(self) -> CompiledModel:
        """The model without its head: the loss of many logits takes the hidden states; compiled on first use."""
        return compile(
            build_decoder(self.config.model, head=False, finetune=self.config.finetune), self.backend
        )

    @cached_property
    def _trunk_keys(self) -> frozenset[str]:
        return frozenset(path[0] for path in self.trunk.params)

    # ---- folders of published models -----------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        rules: AxisRules | None = None,
        overrides: Any = (),
        adapter: str | os.PathLike[str] | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> Self:
        """A published model with its parameters, from a folder in the form of Hugging Face.

        Args:
            folder: with ``config.json`` and safetensors, in one file or several with an index.
            dtype: ``"bfloat16"``, ``"float32"`` …, of parameters and arithmetic; by default that of the file.
            mesh, rules: as for the class: each device gets its part of the parameters.
            overrides: settings as for :meth:`~capibara.config.ModularModelConfig.from_toml`.
            adapter: the folder of a low-rank adapter (PEFT); it stays beside the weights, see :meth:`merged`.
            progress: called with each tensor's name and bytes.

        Returns:
            The model; ``pretrained`` says where it came from.

        Raises:
            FamilyError: (a ``ConfigError``) an unknown family, a setting that Capibara does not do, missing, unknown
                or damaged tensors, or weights stored as pickle.
        """
        load = importlib.import_module("capibara.families").load_pretrained
        given = {"dtype": dtype, "mesh": mesh, "rules": rules, "overrides": overrides}
        return load(cls, folder, **given, adapter=adapter, progress=progress)

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, family: str | None = None, dtype: str | None = None
    ) -> None:
        """Write the model with its parameters as a folder in the form of Hugging Face; adapters are merged.

        Args:
            folder: appears when it is complete; files of the same names in it are replaced.
            family: ``"llama"``, ``"qwen3"`` …; by default the one that the model came from, otherwise the first that
                has such models.
            dtype: of the tensors; by default as they were stored, otherwise as the parameters are.

        Raises:
            FamilyError: (a ``ConfigError``) the family, or every one, cannot express the model's settings.
            OSError: the folder cannot be written; what was there is unchanged.
        """
        save = importlib.import_module("capibara.families").save_folder
        save(self, self.params, folder, family=family, dtype=dtype, source=self.pretrained)

    # ---- parameters ---------------------------------------------------------------------------------------

    def init(self, seed: int | jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fresh ``(params, state)``: nested dicts of arrays.

        Args:
            seed: an integer from 0 to 2³² − 1, or a JAX key.

        Raises:
            InputError: ``seed`` is neither.
        """
        import jax

        key = as_key(seed)
        return self.compiled.init(key), self.compiled.init_state(jax.random.fold_in(key, 1))

    def _own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._state is None and not self.compiled.states:
            self._state = {}  # nothing to be drawn: parameters that were set are not drawn once more for it
        if self._params is None or self._state is None:
            params, state = self.init(self.config.train.seed)
            self._params = params if self._params is None else self._params
            self._state = state if self._state is None else self._state
        return self._params, self._state

    @property
    def params(self) -> dict[str, Any]:
        """The model's own parameters, initialised from ``train.seed`` on first access. Can be set."""
        return self._own()[0]

    @params.setter
    def params(self, value: dict[str, Any]) -> None:
        self._params = value

    @property
    def state(self) -> dict[str, Any]:
        """The model's own non-trained state (codebooks); ``{}`` if it has none. Can be set."""
        return self._own()[1]

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._state = value

    @property
    def param_axes(self) -> dict[str, Any]:
        """Logical axis names of every parameter, nested like ``params``."""
        return self.compiled.param_axes

    @property
    def state_axes(self) -> dict[str, Any]:
        """Logical axis names of the non-trained state, nested like ``state``."""
        return self.compiled.state_axes

    @cached_property
    def trainable(self) -> dict[str, Any] | None:
        """A boolean for each parameter, nested like ``params``; ``None`` if all are trained."""
        if self.config.finetune.method == "full":
            return None
        return adapter_mask(self.param_axes)

    def merged(self, params: Mapping[str, Any] | None = None) -> Self:
        """The same model without adapters, with their products in the weights.

        Args:
            params: as ``model.params``, which is the default.
        """
        config = self.config.with_overrides({"finetune.method": "full"})
        model = type(self)(config, mesh=self.mesh, rules=self.backend.rules)
        finetune = self.config.finetune
        model.params = merge_adapters(
            self.params if params is None else params, finetune.alpha / finetune.rank
        )
        model.pretrained, model.tokenizer_files = self.pretrained, self.tokenizer_files
        return model

    def with_adapters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of this model: those given, and fresh adapters, which change nothing yet.

        Args:
            params: of the same model without adapters.
        """
        import jax

        if self.trainable is None:
            return dict(params)
        # Compiled, so that the parameters that are not used are not drawn.
        fresh = jax.jit(lambda: only_adapters(self.init(self.config.train.seed)[0]))
        with self.backend.scope():
            return add_adapters(params, fresh())

    @property
    def num_params(self) -> int:
        """Number of trainable scalars."""
        return self.compiled.num_params

    # ---- running ------------------------------------------------------------------------------------------

    def apply(
        self,
        params: Mapping[str, Any],
        inputs: Any,
        *,
        state: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> Any:
        """Logits ``[batch, sequence, vocab]`` in the accumulation dtype.

        Args:
            params: as ``model.params``.
            inputs: ``int32 [batch, sequence]`` tokens, or ``{"tokens": …}``.
            state: as ``model.state``; without it the model's own is read.
            key: random key for dropout and codebook revival; needed in training if the model has them.
            train: training mode.

        Returns:
            ``logits``, or ``(logits, new_state)`` if ``state`` is given.
        """
        tokens = _tokens(inputs)
        used = state if state is not None else (self.state if self.compiled.states else {})
        outputs, after = self.compiled.apply(params, {"tokens": tokens}, state=used, key=key, train=train)
        return outputs["logits"] if state is None else (outputs["logits"], after)

    def __call__(self, inputs: Any) -> jax.Array:
        """``apply`` with the model's own parameters, jitted."""
        import jax

        tokens = jax.numpy.asarray(_tokens(inputs))
        with self.backend.scope():
            return self._forward(self.params, tokens, self.state)

    def forward(self, inputs: Any) -> jax.Array:
        """The same as calling the model."""
        return self(inputs)

    @cached_property
    def _forward(self) -> Any:
        import jax

        return jax.jit(lambda params, tokens, state: self.apply(params, tokens, state=state)[0])

    def loss(
        self,
        params: Mapping[str, Any],
        batch: Mapping[str, Any],
        *,
        state: Mapping[str, Any],
        key: jax.Array | None = None,
        train: bool = True,
    ) -> tuple[jax.Array, tuple[dict[str, Any], dict[str, jax.Array]]]:
        """Next-token loss, averaged over tokens, in nats; with auxiliary losses added.

        Args:
            batch: ``{"tokens": int32 [batch, sequence + 1]}``: inputs are all but the last, targets all but the
                first.
            state, key, train: as in :meth:`apply`.

        Returns:
            ``(loss, (new_state, metrics))``; ``metrics["cross_entropy"]`` is the loss without auxiliary terms.
        """
        import jax
        import jax.numpy as jnp

        tokens = _tokens(batch)
        if 0 in tokens.shape or tokens.shape[1] < 2:
            raise InputError(
                f"tokens has shape {tuple(tokens.shape)}, expected [batch, sequence + 1]: at least one row of at least "
                "two tokens, the last of which is only a target"
            )
        with self.backend.scope():
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            parts = parts_of(self.config, inputs, self.backend.mesh, self.backend.rules)
            if parts is None:
                outputs, after = self.compiled.apply(
                    params, {"tokens": inputs}, state=state, key=key, train=train
                )
                logits = outputs["logits"]
                chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
                cross_entropy = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
            else:
                own = {key: value for key, value in params.items() if key in self._trunk_keys}
                outputs, after = self.trunk.apply(own, {"tokens": inputs}, state=state, key=key, train=train)
                cross_entropy = next_token_loss(self.config, params, outputs["hidden"], targets, parts)
            metrics = {"cross_entropy": cross_entropy}
            loss = cross_entropy
            if "auxiliary_loss" in outputs:
                loss = loss + outputs["auxiliary_loss"].astype(loss.dtype)
                blocks = self.config.model.block_kinds.count("vq")
                metrics["auxiliary_loss"] = outputs["auxiliary_loss"]
                metrics["codebook_perplexity"] = outputs["perplexity"] / blocks
                metrics["codebook_usage"] = outputs["usage"] / blocks
        return loss, (after, metrics)

    # ---- decoding -----------------------------------------------------------------------------------------

    def init_cache(self, batch_size: int, max_length: int) -> dict[str, Any]:
        """An empty cache for ``batch_size`` rows of up to ``max_length`` tokens: key-value caches, recurrent
        states and the position."""
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} must be an integer of at least 1")
        free = {n for s in self.decoder.states.values() for n in s.shape or () if isinstance(n, str)}
        sizes = {"batch": batch_size, "cache": max_length}
        full = self.decoder.init_state(**{k: v for k, v in sizes.items() if k in free})
        return _without(full, self.compiled.states)

    def decode(
        self,
        params: Mapping[str, Any],
        tokens: jax.Array,
        cache: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Continue from a cache: the logits of the new tokens, and the updated cache.

        Args:
            tokens: ``int32 [batch, new]``: many at once (prefill) or one.
            cache: from :meth:`init_cache` or an earlier call; ``position + new`` must not exceed its length. Under
                tracing (``jax.jit``) the position is not known: there the caller is responsible for the length, and
                rows past the end overwrite the last ones.
            state: as ``model.state``; without it the model's own is read.

        Returns:
            ``(logits [batch, new, vocab], cache)``.

        Raises:
            InputError: the tokens do not fit into the cache, or (outside of tracing) into its remaining part.
        """
        own = state if state is not None else (self.state if self.compiled.states else {})
        outputs, after = self.decoder.apply(params, {"tokens": _tokens(tokens)}, state=_merged(cache, own))
        return outputs["logits"], _without(after, self.compiled.states)

    # ---- what it costs, where it runs ---------------------------------------------------------------------

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        """See :func:`flops_per_token`, for this model."""
        adapters = None
        if self.trainable is not None:
            specs = self.compiled.params.items()
            adapters = sum(
                math.prod(spec.sizes({}, "a parameter")) for path, spec in specs if is_adapter(path)
            )
        return flops_per_token(self.config.model, sequence_length, training, adapters=adapters)

    @property
    def is_tpu_optimized(self) -> bool:
        """Whether this model runs on TPU with its mesh: the settings request it and the devices are available."""
        return bool(self.config.tpu.enabled and self.mesh is not None and self.backend.platform == "tpu")

    @property
    def tpu_mesh_shape(self) -> tuple[int, ...]:
        """The mesh shape of the settings, one size per axis."""
        return self.config.tpu.mesh_shape

    @property
    def tpu_memory_limit_gb(self) -> float:
        """Memory limit per device in the settings, in GiB."""
        return self.config.tpu.memory_limit_gb

    def __repr__(self) -> str:
        m = self.config.model
        return (
            f"ModularCapibaraModel({m.num_layers} × {'/'.join(m.pattern)}, embed {m.embed_dim}, "
            f"vocab {m.vocab_size}, {self.num_params:,} parameters, {self.backend!r})"
        )


def _tokens(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        if "tokens" not in inputs:
            raise InputError(
                f"inputs has the keys {list(inputs)}, expected 'tokens': int32 [batch, sequence]"
            )
        inputs = inputs["tokens"]
    import numpy as np

    try:
        tokens = inputs if hasattr(inputs, "dtype") else np.asarray(inputs)
    except ValueError as error:  # rows of unequal length
        raise InputError(f"tokens is not an array: {error}; expected int32 [batch, sequence]") from None
    if not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"tokens has dtype {tokens.dtype}, expected an integer: int32 [batch, sequence]")
    if len(tokens.shape) != 2:
        raise InputError(f"tokens has shape {tuple(tokens.shape)}, expected [batch, sequence]")
    return tokens


def _mesh(config: ModularModelConfig) -> jax.sharding.Mesh | None:
    import jax
    import numpy as np

    tpu = config.tpu
    if not tpu.enabled or jax.device_count() < tpu.num_chips:
        return None
    devices = np.array(jax.devices()[: tpu.num_chips]).reshape(tpu.mesh_shape)
    return jax.sharding.Mesh(devices, tuple(tpu.mesh_axes))


def _merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(a)
    for key, value in b.items():
        merged[key] = _merged(merged[key], value) if key in merged and isinstance(value, Mapping) else value
    return merged


def _without(tree: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """The nested dict without the leaves at some paths."""
    gone = set(paths)

    def keep(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, Mapping):
                inner = keep(value, (*path, key))
                if inner:
                    kept[key] = inner
            elif (*path, key) not in gone:
                kept[key] = value
        return kept

    return keep(tree, ())
