"""Training on fewer or more devices while it runs: when to, and how a run moves."""
