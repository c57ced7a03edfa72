"""`deepspeed.pipe`: models as lists of layers, on our pipeline. `layer_specs` first, then `pipeline_module`."""
