"""What becomes of a model: a flat graph, passes over it, generated source, and a function with its arrays."""
