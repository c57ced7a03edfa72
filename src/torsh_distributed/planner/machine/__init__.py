"""What the devices and links can do: `machine_profile` reads a measured file or a description, `step_time` uses it."""
