"""The optimizer over offloaded state: `targets` are what it updates, with the update of `CpuAdam`."""
