"""Look at programs and devices while they work: profiles, a monitor, health checks, diagnosis."""
