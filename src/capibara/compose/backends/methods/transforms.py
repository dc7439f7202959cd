"""Transformations of functions: compilation, differentiation, vectorisation.

NumPy has no automatic differentiation of its own: there the functions must use this backend's methods (or operators),
which Capibara can differentiate; ``jit`` returns the function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose.backends.methods.caller import Caller

__all__ = ["Transforms"]


class Transforms(Caller):
    """Transformations of functions. The first argument is the one that is differentiated."""

    def jit(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """``fn``, compiled if the backend has a compiler (``jax.jit``, ``torch.compile``)."""
        return self._call("transform_jit", fn, **options)

    def grad(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The gradient of a function that returns a scalar. Equivalent JAX: ``jax.grad(fn)``."""
        return self._transformed("transform_grad", fn)

    def value_and_grad(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Value and gradient: ``jax.value_and_grad(fn)``."""
        return self._transformed("transform_value_and_grad", fn)

    def vmap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` over the leading dimension of all its arguments: ``jax.vmap(fn)``."""
        return self._transformed("transform_vmap", fn)

    def jacrev(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The matrix of all partial derivatives, row by row: ``jax.jacrev(fn)``."""
        return self._transformed("transform_jacrev", fn)

    def jacfwd(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same, column by column (on NumPy row by row): ``jax.jacfwd(fn)``."""
        return self._transformed("transform_jacfwd", fn)

    def jacobian(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """:meth:`jacrev`."""
        return self.jacrev(fn)

    def vjp(
        self,
        fn: Callable[..., Any],
        primals: Any,
        *,
        cotangents: Any = None,
        has_aux: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Outputs, the cotangents of the primals (or a function that returns them), and the auxiliary result.

        Args:
            fn: takes ``*primals`` (a list) or one dict or array. With ``has_aux`` it returns ``(outputs, aux)``.
            primals: a list of arrays, or a dict of them, or one array.
            cotangents: in the structure of the outputs; None returns a function of them instead.

        Returns:
            ``(outputs, cotangents of primals or a function, aux)``. They come as a list for a list of primals, and
            otherwise in the primals' own structure; aux is an empty dict or list without ``has_aux``.
        """
        rows = list(primals) if isinstance(primals, list | tuple) else [primals]
        given = self._call("transform_vjp", fn, *rows, has_aux=has_aux)
        outputs, pull = given[:2]
        aux = given[2] if has_aux else ({} if isinstance(cotangents, dict) else [])

        def pulled(values: Any) -> Any:
            back = self._under_settings(pull, values)
            return list(back) if isinstance(primals, list | tuple) else back[0]

        return outputs, pulled if cotangents is None else pulled(cotangents), aux

    def _under_settings(self, fn: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def _transformed(self, kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        made = self._call(kind, fn)

        def run(*args: Any) -> Any:
            return self._under_settings(made, *args)

        return run
