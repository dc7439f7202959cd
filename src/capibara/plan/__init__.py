"""Knowing what a program needs on a TPU slice before renting one: memory, time and price."""
