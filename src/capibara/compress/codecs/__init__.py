"""The ways to store a tensor in fewer bytes, a module each."""
