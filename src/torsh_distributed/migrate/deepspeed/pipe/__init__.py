"""`deepspeed.pipe`: models as lists of layers, on our pipeline. Read `layer_specs`, `pipeline_module`, `pipeline_engine`."""
