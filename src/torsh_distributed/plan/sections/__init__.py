"""The sections of a plan, one file each; those of the mesh and its axes are in `axes`."""
