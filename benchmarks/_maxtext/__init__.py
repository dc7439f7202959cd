"""Published train steps of MaxText: what was measured (``rows.toml``), and the same steps as programs to compile."""
