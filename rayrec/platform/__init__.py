"""What every room stands on: devices, cluster, configuration, runs, metrics."""
