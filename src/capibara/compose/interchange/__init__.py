"""Models in and out: as JSON, from other libraries, and as programs of theirs."""
