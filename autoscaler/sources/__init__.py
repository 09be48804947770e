"""Where readings come from, one module per origin. Each turns foreign bytes into core values, and failures into gaps."""
