"""`ModularCapibaraModel`: a language model, decoder or encoder, with parameters, loss and decoding.

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
from capibara.compose.physical.sharding import param_shardings
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core.adapters import (
    adapter_mask,
    adapter_products,
    add_adapters,
    dequantise_base,
    is_adapter,
    merge_adapters,
    only_adapters,
    quantise_base,
)
from capibara.core.decoder import build_decoder
from capibara.core.encoders import require_decoder
from capibara.core.flops import flops_per_token
from capibara.core.loss import losses_of, mean_of, next_token_loss, parts_of
from capibara.core.paged import (
    StepShape,
    check_step,
    empty_pages,
    has_codes,
    is_coded_dtype,
    kept_in_place,
    page_width,
)
from capibara.core.pipelined import PipelinedLoss, stages_of
from capibara.core.preferences import check_pairs, preference_loss, without_reference
from capibara.core.texts import Texts, check_targets, texts_of
from capibara.data import ByteTokenizer, FileTokenizer, Tokenizer, TokenizerError

if TYPE_CHECKING:
    import jax


__all__ = ["ModularCapibaraModel"]


class ModularCapibaraModel:
    """A language model configured by TOML: a decoder, or an encoder (``model.causal = false``).

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
        self._platform = platform
        p = config.precision
        policy = Precision(p.param_dtype, p.compute_dtype, p.accumulate_dtype, p.exchange)
        self.backend = JaxBackend(policy=policy, device_mesh=self.mesh, platform=platform, rules=rules)
        self._forms: dict[Any, CompiledModel] = {}
        self.compiled: CompiledModel = self._form()
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

    def computing_in(self, dtype: str) -> Self:
        """The same model with arithmetic in another dtype, without this one's parameters, which fit as they are stored.

        Raises:
            ConfigError: no model computes in it.
        """
        if dtype == self.config.precision.compute_dtype:
            return self
        config = self.config.with_overrides({"precision.compute_dtype": dtype})
        other = type(self)(config, mesh=self.mesh, rules=self.backend.rules, platform=self._platform)
        other.pretrained, other.tokenizer_files = self.pretrained, self.tokenizer_files
        return other

    def _form(self, *, cached: bool = False, head: bool = True, ragged: bool = False) -> CompiledModel:
        """A form of the model (:func:`~capibara.core.decoder.build_decoder`); compiled on first use."""
        key = cached, head, ragged
        if key not in self._forms:
            if cached:
                require_decoder(self.config.model, "decoding with a cache")
            logical = build_decoder(
                self.config.model, cached=cached, head=head, ragged=ragged, finetune=self.config.finetune
            )
            self._forms[key] = compile(logical, self.backend)
        return self._forms[key]

    def _paged_form(self, shape: StepShape, *, coded: bool = False) -> CompiledModel:
        """The form for steps of such a shape, with pages of codes or of numbers; compiled on first use."""
        key = shape, coded
        if key not in self._forms:
            require_decoder(self.config.model, "decoding with a cache")
            settings = self.config.model
            if coded and settings.latent.kv_rank is not None:
                raise InputError(
                    "dtype='int8': the pages of this model hold latents, which have no codes. Choose a dtype of floats"
                )
            width = page_width(settings.resolved_head_dim, self.backend.platform)
            given = {"paged": shape, "page_width": width, "page_codes": coded}
            logical = build_decoder(settings, finetune=self.config.finetune, **given)
            self._forms[key] = compile(logical, self.backend)
        return self._forms[key]

    @property
    def decoder(self) -> CompiledModel:
        """The decoding form with a cache; compiled on first use."""
        return self._form(cached=True)

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

    @property
    def trunk(self) -> CompiledModel:
        """The model without its head: the loss of many logits takes the hidden states; compiled on first use."""
        return self._form(head=False)

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
            folder: with ``config.json`` and safetensors, in one file or several with an index; or a GGUF file.
                Quantized weights (GGUF, compressed-tensors) are decoded.
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
        self,
        folder: str | os.PathLike[str],
        *,
        family: str | None = None,
        dtype: str | None = None,
        format: str | None = None,
        quantize: str | None = None,
        asymmetric: bool = False,
    ) -> None:
        """Write the model with its parameters in a form that others load; adapters are merged.

        Args:
            folder: in the form of Hugging Face, or a file whose name ends with ``.gguf``; appears when it is complete.
                Files of the same names in a folder are replaced.
            family: ``"llama"``, ``"qwen3"`` …; by default the one that the model came from, otherwise the first that
                has such models.
            dtype: of the tensors; by default as they were stored, otherwise as the parameters are.
            format: ``"safetensors"``, ``"compressed-tensors"`` or ``"gguf"``; by default what ``folder`` and
                ``quantize`` ask for.
            quantize: for vLLM (compressed-tensors) ``"int4"``, ``"int8"`` or ``"w8a8"``; for llama.cpp (GGUF)
                ``"q8_0"``, ``"q4_0"``, ``"f16"``, ``"bf16"`` or ``"f32"``.
            asymmetric: of ``"int4"`` and ``"int8"``: scales come with zero points.

        Raises:
            FamilyError: (a ``ConfigError``) the family, or every one, cannot express the model's settings; arguments
                that do not fit each other.
            OSError: the folder cannot be written; what was there is unchanged.
        """
        save = importlib.import_module("capibara.families").save_model
        given = {"format": format, "quantize": quantize, "asymmetric": asymmetric}
        save(self, self.params, folder, family=family, dtype=dtype, **given)

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
            import jax

            # The first use may be inside a transformation, whose values must not stay in the model.
            with jax.ensure_compile_time_eval():
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
    def given(self) -> dict[str, Any] | None:
        """The model's own parameters if it has them already: they were read, set or used."""
        return self._params

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

    def without_adapters(self) -> Self:
        """The same model without adapters, and without parameters; the model itself if it has no adapters."""
        return self if self.trainable is None else self._anew()

    def _anew(self) -> Self:
        config = self.config.with_overrides({"finetune.method": "full", "finetune.base": "none"})
        return type(self)(config, mesh=self.mesh, rules=self.backend.rules)

    def merged(self, params: Mapping[str, Any] | None = None) -> Self:
        """The same model without adapters, with their products in the weights.

        Args:
            params: as ``model.params``, which is the default.
        """
        finetune, model = self.config.finetune, self._anew()
        params = self.params if params is None else params
        if finetune.base != "none":
            params = dequantise_base(params, self, model)
        model.params = merge_adapters(params, finetune.alpha / finetune.rank)
        model.pretrained, model.tokenizer_files = self.pretrained, self.tokenizer_files
        return model

    def with_adapters(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of this model: those given, and fresh adapters, which change nothing yet.

        Args:
            params: of the same model without adapters. With ``finetune.base`` those beside adapters are quantized.
        """
        import jax

        if self.trainable is None:
            return dict(params)
        if self.config.finetune.base != "none":
            params = quantise_base(params, self)
        # Compiled, so that the parameters that are not used are not drawn.
        fresh = jax.jit(lambda: only_adapters(self.init(self.config.train.seed)[0]))
        with self.backend.scope():
            return add_adapters(params, fresh())

    @property
    def num_params(self) -> int:
        """Number of scalars; a weight that is stored in fewer bits has as many as before."""
        if self.config.finetune.base == "none":
            return self.compiled.num_params
        return self.without_adapters().compiled.num_params + self._adapter_size

    @cached_property
    def _adapter_size(self) -> int:
        specs = self.compiled.params.items()
        return sum(math.prod(spec.sizes({}, "a parameter")) for path, spec in specs if is_adapter(path))

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
        """Logits ``[batch, sequence, vocab]`` in the accumulation dtype; without a head the hidden states.

        Args:
            params: as ``model.params``.
            inputs: ``int32 [batch, sequence]`` tokens, or ``{"tokens": …}``. Rows with several texts, or with
                padding, have also ``"segments" int32 [batch, sequence]``: equal numbers for the tokens of one text, 0
                for padding (a mask of ones and zeros does), whose logits mean nothing. Positions are counted from the
                start of each text, unless ``"positions"`` has others. ``"token_types" int32 [batch, sequence]``, by
                default 0, is for models with ``model.token_types``.
            state: as ``model.state``; without it the model's own is read.
            key: random key for dropout and codebook revival; needed in training if the model has them.
            train: training mode.

        Returns:
            ``logits``, or ``(logits, new_state)`` if ``state`` is given. With ``model.head = "none"``, what
            :meth:`hidden` gives is in the place of the logits.
        """
        texts = texts_of(inputs)
        used = state if state is not None else (self.state if self.compiled.states else {})
        form = self._form(ragged=texts.ragged)
        outputs, after = form.apply(params, self._inputs(texts), state=used, key=key, train=train)
        out = outputs["hidden" if self.config.model.head == "none" else "logits"]
        return out if state is None else (out, after)

    def _inputs(self, texts: Texts) -> dict[str, Any]:
        return texts.inputs(typed=bool(self.config.model.token_types))

    def hidden(
        self,
        params: Mapping[str, Any],
        inputs: Any,
        *,
        state: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Hidden states ``[batch, sequence, embed]`` in the compute dtype: what the head is given.

        :class:`capibara.serve.Embedder` makes vectors of texts of them.

        Args:
            params, inputs, state, key, train: as in :meth:`apply`.
        """
        texts = texts_of(inputs)
        used = state if state is not None else (self.state if self.compiled.states else {})
        own = {name: value for name, value in params.items() if name in self._trunk_keys}
        form = self._form(head=False, ragged=texts.ragged)
        return form.apply(own, self._inputs(texts), state=used, key=key, train=train)[0]["hidden"]

    def pooled(
        self, params: Mapping[str, Any], inputs: Any, *, key: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        """The pooler's ``[batch, embed]``, ``tanh(x W + b)`` of the state ``x`` of each row's first token.

        Args:
            params, inputs, key, train: as in :meth:`apply`.

        Raises:
            InputError: the model has no pooler (``model.pooler``).
        """
        if not self.config.model.pooler:
            raise InputError("pooled: the model has no pooler (model.pooler=false). Use hidden states")
        texts = texts_of(inputs)
        form = self._form(ragged=texts.ragged)
        used = self.state if self.compiled.states else {}
        return form.apply(params, self._inputs(texts), state=used, key=key, train=train)[0]["pooled"]

    def __call__(self, inputs: Any) -> jax.Array:
        """``apply`` with the model's own parameters, jitted."""
        import jax

        arrays = {key: jax.numpy.asarray(x) for key, x in self._inputs(texts_of(inputs)).items()}
        with self.backend.scope():
            return self._forward(self.params, arrays, self.state)

    def forward(self, inputs: Any) -> jax.Array:
        """The same as calling the model."""
        return self(inputs)

    @cached_property
    def _forward(self) -> Any:
        import jax

        return jax.jit(lambda params, inputs, state: self.apply(params, inputs, state=state)[0])

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
                first. ``segments`` and ``positions`` as in :meth:`apply`, with as many columns: the loss does not go
                over the end of a text. ``weights``, numbers of the same shape: how much the prediction of each token
                counts; the loss is then the sum of the weighted losses over that of the weights, 0 if that is 0.
            state, key, train: as in :meth:`apply`.

        Returns:
            ``(loss, (new_state, metrics))``; ``metrics["cross_entropy"]`` is the loss without auxiliary terms.
        """
        import jax
        import jax.numpy as jnp

        require_decoder(self.config.model, "the loss of next tokens")
        staged, pairs = self.loss_of_microbatches, self.config.finetune.objective == "dpo"
        if pairs and staged is not None:
            check_pairs(batch, reference=True)
            arrays = texts_of(without_reference(batch)).arrays() | {"reference": batch["reference"]}
            return staged(params, staged.cut(arrays), state=state, key=key, train=train)
        if pairs:
            loss, metrics = preference_loss(self, params, batch, state=state, key=key, train=train)
            return loss, (dict(state), metrics)
        texts = texts_of(batch)
        tokens = texts.tokens
        check_targets(tokens.shape)
        if staged is not None:
            return staged(params, staged.cut(texts.arrays()), state=state, key=key, train=train)
        with self.backend.scope():
            inputs, targets, weights = texts.without_last(), tokens[:, 1:], texts.target_weights()
            parts = parts_of(self.config, inputs.tokens, self.backend.mesh, self.backend.rules)
            form = self._form(head=parts is None, ragged=texts.ragged)
            if parts is None:
                outputs, after = form.apply(params, inputs.inputs(), state=state, key=key, train=train)
                logits = outputs["logits"]
                chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
                losses = jax.nn.logsumexp(logits, axis=-1) - chosen
                if weights is None:
                    cross_entropy = jnp.mean(losses)
                else:
                    # Not 0 times the loss: it may be infinite where nothing is to be predicted.
                    weighted = jnp.where(weights == 0, 0, losses * weights.astype(losses.dtype))
                    cross_entropy = mean_of(jnp.sum(weighted), weights)
            else:
                own = {key: value for key, value in params.items() if key in self._trunk_keys}
                outputs, after = form.apply(own, inputs.inputs(), state=state, key=key, train=train)
                cross_entropy = next_token_loss(
                    self.config, params, outputs["hidden"], targets, parts, weights=weights
                )
            metrics = {"cross_entropy": cross_entropy}
            loss = cross_entropy
            if "auxiliary_loss" in outputs:
                loss = loss + outputs["auxiliary_loss"].astype(loss.dtype)
                blocks = self.config.model.block_kinds.count("vq")
                metrics["auxiliary_loss"] = outputs["auxiliary_loss"]
                metrics["codebook_perplexity"] = outputs["perplexity"] / blocks
                metrics["codebook_usage"] = outputs["usage"] / blocks
        return loss, (after, metrics)

    @cached_property
    def loss_of_microbatches(self) -> PipelinedLoss | None:
        """The loss of arrays ``[microbatches, batch, sequence + 1]``, if the mesh has the axis ``pipeline``.

        Raises:
            ConfigError: the model cannot be divided into so many stages.
        """
        return PipelinedLoss(self.config, self.backend) if stages_of(self.mesh) > 1 else None

    def token_losses(
        self,
        params: Mapping[str, Any],
        batch: Any,
        *,
        state: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """The loss of each token but the first, in nats: ``[batch, sequence]`` in the accumulation dtype.

        Args:
            params, state, key, train: as in :meth:`apply`.
            batch: as in :meth:`loss`; tokens that cannot be predicted, at the start of a text, have losses that mean
                nothing.
        """
        import jax
        import jax.numpy as jnp

        require_decoder(self.config.model, "the loss of next tokens")
        texts = batch if isinstance(batch, Texts) else texts_of(batch)
        used = state if state is not None else (self.state if self.compiled.states else {})
        with self.backend.scope():
            inputs, targets = texts.without_last(), jnp.asarray(texts.tokens)[:, 1:]
            parts = parts_of(self.config, inputs.tokens, self.backend.mesh, self.backend.rules)
            if parts is not None:
                form = self._form(head=False, ragged=texts.ragged)
                own = {name: value for name, value in params.items() if name in self._trunk_keys}
                outputs, _ = form.apply(own, inputs.inputs(), state=used, key=key, train=train)
                return losses_of(self.config, params, outputs["hidden"], targets, parts)
            outputs, _ = self._form(ragged=texts.ragged).apply(
                params, inputs.inputs(), state=used, key=key, train=train
            )
            logits = outputs["logits"]
            chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return jax.nn.logsumexp(logits, axis=-1) - chosen

    # ---- decoding -----------------------------------------------------------------------------------------

    def init_cache(self, batch_size: int, max_length: int, *, ragged: bool = False) -> dict[str, Any]:
        """An empty cache for ``batch_size`` rows of up to ``max_length`` tokens: key-value caches, recurrent
        states and the position; with ``ragged`` one position for each row."""
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} must be an integer of at least 1")
        decoder = self._form(cached=True, ragged=ragged)
        free = {n for s in decoder.states.values() for n in s.shape or () if isinstance(n, str)}
        sizes = {"batch": batch_size, "cache": max_length}
        full = decoder.init_state(**{k: v for k, v in sizes.items() if k in free})
        return _without(full, self.compiled.states)

    def decode(
        self,
        params: Mapping[str, Any],
        tokens: Any,
        cache: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Continue from a cache: the logits of the new tokens, and the updated cache.

        Args:
            tokens: ``int32 [batch, new]``: many at once (prefill) or one. For a ``ragged`` cache also
                ``{"tokens": …, "segments": …}``: where ``segments int32 [batch, new]`` is 0 there is padding, before,
                after or between the tokens. It takes no place in the cache, and its logits mean nothing.
            cache: from :meth:`init_cache` or an earlier call; ``position + new`` must not exceed its length. Under
                tracing (``jax.jit``) the position is not known: there the caller is responsible for the length, and
                rows past the end overwrite the last ones.
            state: as ``model.state``; without it the model's own is read.

        Returns:
            ``(logits [batch, new, vocab], cache)``.

        Raises:
            InputError: the tokens do not fit into the cache, or (outside of tracing) into its remaining part; or
                there is padding, and the cache is not a ``ragged`` one.
        """
        import jax.numpy as jnp

        own = state if state is not None else (self.state if self.compiled.states else {})
        texts = texts_of(tokens)
        ragged = jnp.ndim(cache.get("position", 0)) > 0
        inputs = {"tokens": texts.tokens}
        if ragged:
            inputs["segments"] = (
                jnp.ones(texts.tokens.shape, jnp.int32) if texts.segments is None else texts.segments
            )
        elif texts.segments is not None:
            raise InputError(
                "segments: the cache counts all rows alike. Make one with init_cache(…, ragged=True)"
            )
        if texts.positions is not None or texts.weights is not None:
            raise InputError(
                "decode takes tokens and segments only: positions are counted by the cache, and there is no loss"
            )
        decoder = self._form(cached=True, ragged=ragged)
        outputs, after = decoder.apply(params, inputs, state=_merged(cache, own))
        return outputs["logits"], _without(after, self.compiled.states)

    def init_pages(
        self, pages: int, page_size: int, slots: int = 1, *, dtype: Any | None = None
    ) -> dict[str, Any]:
        """Empty pools for :meth:`decode_pages`.

        Args:
            pages: of the keys and values of each block that attends. page_size: positions of a page.
            slots: recurrent states of each state-space block.
            dtype: of keys and values, one of floats; by default that of arithmetic. ``"int8"``: codes, with a scale in
                float32 for each head of a position.

        Raises:
            InputError: a number is below 1, or the dtype is neither int8 nor of floats; the model is an encoder
                (``ConfigError``).
        """
        cache = self._empty_pages(pages, page_size, slots, dtype)
        if self.mesh is None:
            return cache
        import jax

        return jax.device_put(cache, self._page_shardings(cache))

    def describe_pages(
        self, pages: int, page_size: int, slots: int = 1, *, dtype: Any | None = None
    ) -> dict[str, Any]:
        """What :meth:`init_pages` gives, as ``jax.ShapeDtypeStruct`` with its sharding; nothing is allocated.

        Args and raises: as there.
        """
        import jax

        cache = jax.eval_shape(lambda: self._empty_pages(pages, page_size, slots, dtype))
        if self.mesh is None:
            return cache
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            cache,
            self._page_shardings(cache),
        )

    def _empty_pages(self, pages: int, page_size: int, slots: int, dtype: Any | None) -> dict[str, Any]:
        coded = is_coded_dtype(dtype)
        heads = self.config.model.num_kv_heads or self.config.model.num_heads
        apart = heads // (dict(self.mesh.shape).get("model", 1) if self.mesh is not None else 1)
        if coded and self.backend.platform == "tpu" and apart % 8:
            # XLA gives such pools a layout with the pages innermost, and copies all of them in each step.
            raise InputError(
                f"dtype='int8': on TPUs a device needs a multiple of 8 key heads for pages of codes, here it has "
                f"{apart}. Choose 'bfloat16', or fewer devices"
            )
        form = self._paged_form(StepShape(1), coded=coded)
        found = empty_pages(form, pages, page_size, slots, None if coded else dtype)
        return _without(found, self.compiled.states)

    def _page_shardings(self, cache: Mapping[str, Any]) -> Any:
        assert self.mesh is not None
        form = self._paged_form(StepShape(1), coded=has_codes(cache))
        axes = _without(form.state_axes, self.compiled.states)
        return param_shardings(cache, axes, self.mesh, self.backend.rules)

    def decode_pages(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        cache: Mapping[str, Any],
        shape: StepShape,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """New tokens of many sequences, whose earlier ones are in pools (Kwon et al., arXiv:2309.06180).

        Within one shape, the logits of a sequence do not depend on the others, on its pages or its slot.

        Args:
            inputs: int32 arrays. ``tokens [shape.tokens]``: one of each of ``shape.rows`` sequences, then
                ``shape.chunk`` of each of ``shape.chunks``. Of each sequence, in this order: ``starts [sequences]``,
                how many tokens it has already; ``counts [sequences]``, how many of its tokens here are real, the first
                ones (0: it takes no part); ``page_table [sequences, any]``, its pages, those for the new tokens
                included, below 0 where there is none; ``slots [sequences]``, where its recurrent state is (of a
                sequence that starts at 0 it is cleared), below 0 for none. ``outputs [any]``: which of the tokens are
                scored. What a model does not need may be missing: pages without attention, slots without state-space
                blocks.
            cache: from :meth:`init_pages` or the last step; donated under ``jax.jit``, it is written in place.
            shape: static, part of the compiled program.
            state: as ``model.state``; without it the model's own is read.

        Returns:
            ``(logits [outputs, vocab], cache)``, in the accumulation dtype.

        Raises:
            InputError: an array is missing or has another shape.
        """
        form = self._paged_form(shape, coded=has_codes(cache))
        own = state if state is not None else (self.state if self.compiled.states else {})
        arrays = check_step(inputs, shape, tuple(form.inputs))
        outputs, after = form.apply(params, arrays, state=_merged(cache, own))
        return outputs["logits"][0], kept_in_place(form, _without(after, self.compiled.states))

    # ---- what it costs, where it runs ---------------------------------------------------------------------

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        """See :func:`flops_per_token`, for this model."""
        adapters = None
        if self.trainable is not None:
            adapters = adapter_products(self.compiled.params, self.config.model.experts)
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


def _mesh(config: ModularModelConfig) -> jax.sharding.Mesh | None:
    import jax

    from capibara.hardware import build_mesh

    tpu = config.tpu
    if not tpu.enabled or jax.device_count() < tpu.num_chips:
        return None
    return build_mesh(tpu.mesh_shape, tpu.mesh_axes, jax.devices()[: tpu.num_chips])


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
