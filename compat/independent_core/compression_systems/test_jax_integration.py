"""``python -m independent_core.compression_systems.test_jax_integration``: does the system work here, and with JAX?"""

from capibara.compress.system.self_test import main as main

if __name__ == "__main__":
    raise SystemExit(main())
