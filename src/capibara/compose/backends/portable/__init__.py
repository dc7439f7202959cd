"""The operations of models once more, in array functions that both NumPy and PyTorch have.

Each file is a category, as in :mod:`capibara.compose.backends.jax_ops`; a function finds out from its arrays whose
functions to call (:mod:`.space`). With NumPy arrays that are traced, the operations can be differentiated.
"""
