"""``jax.numpy`` and one name more: ``random``, which is :mod:`jax.random`.

JAX keeps its random numbers in ``jax.random``, because each call takes a key. ``jnp.random`` is that same
module (``jnp.random.normal(key, shape)``); it has nothing of NumPy's global random state.
"""

import jax as _jax

from capibara.jax._overlay import overlay as _overlay

# `import jax.numpy` would enter JAX's import cycle at the side when another thread is importing jax.
_overlay(__name__, _jax.numpy, {"random": "jax.random"})
