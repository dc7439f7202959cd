"""Kernels compiled ahead of time, called by XLA's CPU programs through ``jax.ffi``.

Where XLA's CPU compiler cannot reach what the cores can do, a kernel is written in C++ (``cc/``) with portable
vectors. It is compiled once for every instruction set worth having, into one library beside this file, and
the library chooses by the processor it runs on. The package's build makes that library when it finds a C++
compiler; without one everything still runs, on the plain XLA form. ``python -m capibara.ops.native`` builds it
again in place, for instance after an update of jaxlib.

``CAPIBARA_NATIVE=0`` in the environment leaves the library out.
"""

from capibara.ops.native.library import call, isa, problem

__all__ = ["call", "isa", "problem"]
