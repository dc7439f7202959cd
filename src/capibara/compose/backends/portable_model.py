"""Compiled models on PyTorch and NumPy: the same interface as on JAX, without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.compose.backends import philox
from capibara.compose.errors import InputError
from capibara.compose.physical.checks import check_call
from capibara.compose.physical.compiled import CompiledModel
from capibara.compose.physical.misfit import explaining
from capibara.compose.physical.signature import reader
from capibara.compose.physical.specs import ArraySpec, nest
from capibara.compose.physical.starting import check_sizes, check_start, own_name, with_initialisers
from capibara.errors import did_you_mean

__all__ = ["PortableModel"]

_MOST_SEEN = 64
"""Signatures of calls that are kept: more come of lengths that never end."""


class PortableModel(CompiledModel):
    """A compiled model whose backend is PyTorch or NumPy. Keys are that backend's (``backend.get_random_key()``)."""

    def init(self, key: Any, **sizes: int) -> dict[str, Any]:
        """Fresh parameters; each array's randomness comes from ``key`` and its own path."""
        return self._make(self.params, philox.check_key(key), sizes, "parameter")

    def randomize_params(self, seed: Any = 0, *, init: Any | None = None, **sizes: int) -> dict[str, Any]:
        """:meth:`init` with the key of a seed from 0 to 2³² − 1, and other initialisers on request."""
        specs = self.params if init is None else with_initialisers(self.params, init)
        return self._make(specs, philox.as_key(seed), sizes, "parameter")

    def init_state(self, key: Any | None = None, **sizes: int) -> dict[str, Any]:
        """The state to start with: ``{}`` for a model without any."""
        own = philox.as_key(0) if key is None else philox.check_key(key)
        return self._make(self.states, own, sizes, "state")

    def _make(
        self,
        specs: dict[Any, ArraySpec],
        key: Any,
        sizes: Mapping[str, int],
        what: str,
        *,
        keep: bool = True,
    ) -> dict[str, Any]:
        import numpy as np

        from capibara.compose.backends.starting_values import start

        check_sizes(specs, sizes, what)
        arrays = {}
        for path, spec in specs.items():
            shape = spec.sizes(sizes, f"the {what} {'.'.join(path)}")
            own = philox.fold(key, own_name(path, spec))
            assert own is not None
            count = int(np.prod(shape[: spec.stack], dtype=np.int64))
            inner = shape[spec.stack :]
            rows = [start(spec.init, k, inner) for k in (philox.split(own, count) if spec.stack else [own])]
            for row in rows:
                check_start(f"the {what} {'.'.join(path)!r}", row, inner)
            whole = np.stack(rows).reshape(shape) if spec.stack else rows[0]
            arrays[path] = self.backend.array(whole, dtype=spec.dtype)
        return nest(arrays)

    def apply(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        key: Any | None = None,
        train: bool = False,
    ) -> Any:
        """The model as a function of its arguments; see :meth:`CompiledModel.apply`."""
        inputs = self._arrays(inputs)
        self._check(params, inputs, state, key)
        self._check_inference(None, train)
        with self.backend.scope(), explaining(self.model, inputs):
            outputs, after = self.function(params, inputs, {} if state is None else state, key, train)
        return outputs if state is None else (outputs, after)

    def evaluate(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        output_gradients: Mapping[str, Any] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        key: Any | None = None,
        train: bool = False,
    ) -> Any:
        """Outputs, and with ``output_gradients`` the gradients of the parameters: :meth:`CompiledModel.evaluate`.

        Names, shapes and dtypes are checked when they are not those of a call that was checked before.
        """
        seen = None
        if state is None and key is None and train is False:
            seen = self._read(params, inputs)
            if seen is not None and output_gradients is not None:
                seen = self._with_cotangents(seen, output_gradients)
            if seen is not None and seen in self._seen:
                try:
                    return self._at_once(params, inputs, output_gradients)
                except Exception:
                    pass  # what was wrong is said below
        given = inputs
        inputs = self._arrays(inputs)
        self._check(params, inputs, state, key)
        self._check_inference(output_gradients, train)
        with self.backend.scope(), explaining(self.model, inputs):
            if output_gradients is None:
                outputs, after = self._without_gradients(params, inputs, state or {}, key, train)
                result: tuple[Any, ...] = (outputs,)
            else:
                cotangents = _checked(output_gradients, self.outputs)
                outputs, after, gradients = self.backend.run_gradients(
                    self, params, inputs, state or {}, key, train, cotangents
                )
                result = (outputs, gradients)
        if seen is not None and all(inputs[k] is given[k] for k in inputs):  # nothing had to be converted
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(seen)
        if state is not None:
            result = (*result, after)
        return result[0] if len(result) == 1 else result

    def _at_once(self, params: Any, inputs: Any, cotangents: Any) -> Any:
        """A call like one that was checked."""
        backend = self.backend
        with backend.scope():
            if cotangents is None:
                return backend.run_forward(self, params, inputs, {}, None, False)[0]
            outputs, _, gradients = backend.run_gradients(self, params, inputs, {}, None, False, cotangents)
            return outputs, gradients

    @property
    def _read(self) -> Any:
        read = self.__dict__.get("_reader")
        if read is None:
            read = self.__dict__["_reader"] = reader(self.inputs, self.params)
            self._seen: set[Any] = set()
        return read

    def _with_cotangents(self, seen: tuple[Any, ...], given: Any) -> tuple[Any, ...] | None:
        if type(given) is not dict:
            return None
        return (*seen, *[(k, type(v), getattr(v, "dtype", None)) for k, v in given.items()])

    def _without_gradients(self, *args: Any) -> Any:
        return self.backend.run_forward(self, *args)

    def _arrays(self, inputs: Any) -> Any:
        """NumPy arrays become the backend's; what is not an array is left for the check to name."""
        if not isinstance(inputs, Mapping):
            return inputs
        arrays = {k: self.backend.as_input(v) for k, v in inputs.items()}
        if self.backend.needs_x64:
            return arrays
        # As on JAX: a model without float64 computes with none, whatever NumPy makes of Python's numbers.
        return {k: _narrow(v) for k, v in arrays.items()}

    def _direct(self) -> tuple[Any, Any]:
        return None, None

    def _check(self, params: Any, inputs: Any, state: Any, key: Any) -> None:
        check_call(
            inputs,
            params,
            state,
            self.inputs,
            self.params,
            self.states,
            left_out=self._program.left_out,
            shapes=self._program.check_shapes,
            library=self.backend.type,
        )
        if key is not None:
            philox.check_key(key)


def _narrow(value: Any) -> Any:
    name = str(getattr(value, "dtype", ""))
    if name == "float64":
        return value.astype("float32")
    return value.float() if name == "torch.float64" else value


def _checked(given: Any, specs: Mapping[str, ArraySpec]) -> dict[str, Any]:
    """The cotangents of a call.

    Raises:
        InputError: for keys that are not outputs, values that are not floats, and outputs without a gradient.
    """
    if not isinstance(given, Mapping):
        raise InputError(
            f"output_gradients must be a dict of arrays by output, as {{{next(iter(specs))!r}: …}}, not "
            f"{type(given).__name__}"
        )
    for name, value in given.items():
        if name not in specs:
            raise InputError(
                f"output_gradients names {name!r}, which is not an output; the outputs are {list(specs)}."
                f"{did_you_mean(str(name), specs)}"
            )
        if specs[name].dtype in ("int32", "bool"):
            raise InputError(
                f"output_gradients[{name!r}]: the output {name!r} is {specs[name].dtype} and has no gradient; "
                "leave it out of output_gradients"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number and "float" not in str(getattr(value, "dtype", "")):
            kind = getattr(value, "dtype", type(value).__name__)
            raise InputError(
                f"output_gradients[{name!r}] is {kind}, expected an array of {specs[name].dtype} (or another float "
                "dtype) in the shape of that output"
            )
    return dict(given)
