"""Common parts of the backends: dtypes, random state, registered operations, method calls."""

from __future__ import annotations

import contextlib
import importlib
import keyword
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from capibara.compose.backends.methods import Methods
from capibara.compose.backends.refusals import refusal
from capibara.compose.dtypes import dtype_name
from capibara.compose.errors import CompileError, PicklingError, WiringError
from capibara.compose.precision import FLOAT_DTYPES, Precision
from capibara.errors import did_you_mean

__all__ = ["Backend"]

_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, OverflowError, AttributeError, MemoryError)


class Backend(Methods):
    """Base of the backends.

    Attributes:
        type: "jax", "torch" or "numpy".
        ops_module: import path of the operations that generated code calls.
        eager_module: import path of further functions, for methods only.
        is_manualgrad: gradients are generated as source (NumPy), not computed by the library.
        registered_ops: user-defined operations, by name; see :meth:`register_op`.
    """

    type: str = ""
    ops_module: str = ""
    eager_module: str = ""
    is_manualgrad = False
    inf = float("inf")
    nan = float("nan")
    pi = math.pi
    e = math.e

    policy: Precision
    jit_default: bool

    def _start(self, dtype: Any, policy: Precision | None) -> None:
        if policy is None:
            policy = self._policy_of(dtype)
        self.policy = policy
        self.registered_ops: dict[str, Callable[..., Any]] = {}
        self._modules: tuple[Any, ...] = ()
        self._seed: Any = 0
        self._random_state: Any = None

    @staticmethod
    def _policy_of(dtype: Any) -> Precision:
        try:
            name = dtype_name(dtype)
        except ValueError:
            name = None
        if name not in FLOAT_DTYPES:
            raise CompileError(
                f"dtype={dtype!r} is not a floating dtype: use 'float32', 'bfloat16', 'float16' or 'float64'."
                f"{did_you_mean(str(dtype), FLOAT_DTYPES)}"
            )
        return Precision(name, name, "float64" if name == "float64" else "float32")

    @property
    def dtype(self) -> str:
        """The dtype of arithmetic."""
        return self.policy.compute

    @property
    def seed(self) -> Any:
        """The last argument of :meth:`set_seed`; initially 0."""
        return self._seed

    @seed.setter
    def seed(self, value: Any) -> None:
        self._seed = value

    @property
    def _key(self) -> Any:
        # Made at first use: a backend that draws nothing should cost nothing.
        if self._random_state is None:
            self._random_state = self._new_key(self._seed)
        return self._random_state

    @_key.setter
    def _key(self, value: Any) -> None:
        self._random_state = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PicklingError(
            f"{self!r} can be neither pickled nor copied: make another {type(self).__name__}(…) where it is needed"
        )

    def scope(self) -> AbstractContextManager[Any]:
        """A context manager with the settings that this backend needs."""
        return contextlib.nullcontext()

    @property
    def platform(self) -> str:
        """The platform of models compiled on this backend: "cpu", "gpu" or "tpu"."""
        return "cpu"

    @property
    def needs_x64(self) -> bool:
        """Whether any of the backend's dtypes is float64."""
        return "float64" in (self.policy.param, self.policy.compute, self.policy.accumulate)

    def compiled_class(self) -> type:
        """The class of models that ``compile`` returns for this backend."""
        from capibara.compose.physical.compiled import CompiledModel

        return CompiledModel

    # ---- operations of the user's own ---------------------------------------------------------------------

    def register_op(
        self, name: str, function: Callable[..., Any] | None = None, **options: Any
    ) -> Callable[..., Any]:
        """Register an operation for models on this backend; a decorator.

        A model uses it as ``ml.op(name)(input="x", output="y")``. It may have the name of a built-in operation, which
        it then replaces in ``ml.op`` (and nowhere else). The function is returned unchanged::

            @backend.register_op("swish")
            def swish(x):
                return x * backend.sigmoid(x)

        Args:
            name: an identifier. function: the function, when not used as a decorator.
            options: on NumPy, ``vjp``: its derivative, see :class:`~.numpy_backend.NumpyBackend`.

        Raises:
            WiringError: the name is not an identifier, or the function is not callable.
        """
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise WiringError(
                f"register_op: name={name!r:.80} must be an identifier and no word of Python's own, such as 'gelu'"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if not callable(function):
                raise WiringError(f"register_op({name!r}): {function!r} cannot be called")
            self._register(name, function, **options)
            return function

        return register if function is None else register(function)

    def _register(self, name: str, function: Callable[..., Any]) -> None:
        self.registered_ops[name] = function

    # ---- how methods reach their functions ----------------------------------------------------------------

    def _function(self, name: str) -> Callable[..., Any]:
        if not self._modules:
            self._modules = tuple(
                importlib.import_module(path) for path in (self.eager_module, self.ops_module)
            )
        for module in self._modules:
            found = getattr(module, name, None)
            if found is not None:
                return found
        raise AttributeError(f"{self.type} has no function {name}")

    def _float(self, dtype: Any) -> str:
        return self.policy.compute if dtype is None else dtype_name(dtype)

    def _given(self, value: Any) -> Any:
        return value

    def _call(self, function: str, *args: Any, **options: Any) -> Any:
        run = self._function(function)
        try:
            with self.scope():
                return run(*[self._given(a) for a in args], **options)
        except _REFUSALS as error:
            refused = None if function.startswith("transform_") else refusal(function, args, options, error)
            if refused is None:
                raise
            raise refused from error

    def _under_settings(self, fn: Callable[..., Any], *args: Any) -> Any:
        with self.scope():
            return fn(*args)
