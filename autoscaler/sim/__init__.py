"""The closed loop without a cluster: a simulated engine, a fleet of them, and their traffic."""
