"""Code compiled ahead of time: kernels that XLA's CPU programs call through ``jax.ffi``, and the codecs' loops.

Where XLA's CPU compiler cannot reach what the cores can do, or where there is no JAX, a loop is written in C++
(``cc/``) with portable vectors. It is compiled once for every instruction set worth having, into one library beside
this file, and the library chooses by the processor it runs on. The package's build makes that library when it finds a
C++ compiler; without one everything still runs, on the plain XLA or NumPy form. ``python -m capibara.native`` builds it
again in place, for instance after an update of jaxlib.

``CAPIBARA_NATIVE=0`` in the environment leaves the library out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.native.library import call, call_in_place, call_one_by_one, isa, problem

__all__ = ["call", "call_in_place", "call_one_by_one", "isa", "problem"]


def __getattr__(name: str) -> Any:
    # What XLA calls needs JAX; the codecs, which import this package too, do not.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capibara.native import library

    return getattr(library, name)
