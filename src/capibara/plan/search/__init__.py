"""Which layouts are worth compiling, and the compiling of them."""
