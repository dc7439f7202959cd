"""Functions of PyTorch for a backend's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capibara.compose.backends import torch_space
from capibara.compose.backends.portable.creation import Maker
from capibara.compose.backends.portable.eager import *  # noqa: F403

_maker = Maker(torch_space)
draw_normal, draw_uniform, draw_integers = _maker.draw_normal, _maker.draw_uniform, _maker.draw_integers
linspace = _maker.linspace
transform_jit = torch.compile
transform_grad, transform_vmap = torch.func.grad, torch.func.vmap
transform_jacrev, transform_jacfwd = torch.func.jacrev, torch.func.jacfwd


def transform_value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    both = torch.func.grad_and_value(fn)

    def run(*args: Any) -> Any:
        gradient, value = both(*args)
        return value, gradient

    return run


def transform_vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]:
    return torch.func.vjp(fn, *primals, has_aux=has_aux)
