"""What every backend can do with arrays outright, without a model: one file a kind of operation.

The methods are the same on JAX, PyTorch and NumPy; each calls the backend's function of that name, so an array
method and the operation of a compiled model are one piece of code.
"""

from capibara.compose.backends.methods.creation import Creation
from capibara.compose.backends.methods.elementwise import Elementwise
from capibara.compose.backends.methods.randomness import Randomness
from capibara.compose.backends.methods.reductions import Reductions
from capibara.compose.backends.methods.shaping import Shaping
from capibara.compose.backends.methods.transforms import Transforms

__all__ = ["Creation", "Elementwise", "Methods", "Randomness", "Reductions", "Shaping", "Transforms"]


class Methods(Creation, Randomness, Elementwise, Reductions, Shaping, Transforms):
    """All of them."""
