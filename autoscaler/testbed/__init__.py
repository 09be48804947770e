"""A cluster on loopback: a real control plane under nodes and pods that only pretend to run."""
