"""What keys of a DeepSpeed config are in a plan, one file for each part of the plan."""
