"""Where readings come from, one module per origin: foreign bytes in, core values out, and a gap for every failure."""
