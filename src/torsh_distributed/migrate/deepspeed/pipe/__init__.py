"""`deepspeed.pipe`: models as lists of layers, on our pipeline. `pipeline_module` first, then `pipeline_engine`."""
