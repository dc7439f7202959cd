"""What data say about a model: second moments of the inputs of its linear layers, and methods that use them."""
