"""Choose the layouts worth compiling, and compile them."""
