"""Plans as text and as pages."""
