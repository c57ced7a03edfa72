"""The sections of a plan, one file each; those of the mesh's axes are in `axes`."""
