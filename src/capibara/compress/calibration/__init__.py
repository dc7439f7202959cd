"""Calibration data: second moments of the inputs of a model's linear layers, and methods that use them."""
