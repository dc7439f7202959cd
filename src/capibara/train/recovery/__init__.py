"""What a run does when a loss diverges, a step hangs or a device computes wrongly."""
