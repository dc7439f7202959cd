"""Training steps that others ran and timed on hosts of NVIDIA GPUs, rebuilt in plain JAX."""
