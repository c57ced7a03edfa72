"""FairScale's layers for split models: `parallel_groups` lays ranks out, `split_layers` is what Llama imports."""
