"""What the probe reads: the host, the driver, the GPUs that are visible; without torch."""
