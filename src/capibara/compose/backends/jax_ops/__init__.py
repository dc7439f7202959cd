"""The operations of composed models in JAX: the functions that generated code calls as ``ops.<name>``.

Arrays come in their compute dtype; ``accumulate`` names the dtype for sums where that matters. Each function is
the whole definition of its primitive: shapes are as in :mod:`capibara.compose.primitives`.
"""

from capibara.compose.backends.jax_ops.elementwise import *  # noqa: F403
from capibara.compose.backends.jax_ops.experts import *  # noqa: F403
from capibara.compose.backends.jax_ops.indexing import *  # noqa: F403
from capibara.compose.backends.jax_ops.language import *  # noqa: F403
from capibara.compose.backends.jax_ops.linalg import *  # noqa: F403
from capibara.compose.backends.jax_ops.losses import *  # noqa: F403
from capibara.compose.backends.jax_ops.recurrent import *  # noqa: F403
from capibara.compose.backends.jax_ops.reductions import *  # noqa: F403
from capibara.compose.backends.jax_ops.scoring import *  # noqa: F403
from capibara.compose.backends.jax_ops.shaping import *  # noqa: F403
from capibara.compose.backends.jax_ops.windows import *  # noqa: F403
from capibara.compose.backends.jax_repeat import checkpointed as checkpointed
from capibara.compose.backends.jax_repeat import repeat as repeat
