"""Making tensors and models smaller: codecs, and the archive that holds what they make."""
