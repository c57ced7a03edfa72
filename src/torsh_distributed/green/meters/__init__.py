"""The meters of a node: `node_meter` reads all of them; `counter_meter` judges a counter,
`load_estimate` stands in, `gpu_state` says who else computes on a GPU."""
