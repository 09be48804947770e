"""The pure core: decisions as functions of values. No clock, chance, logging, files or network."""
