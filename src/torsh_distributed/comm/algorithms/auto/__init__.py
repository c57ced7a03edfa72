"""`algorithm="auto"`: measure what messages cost (`measured_costs`), then try the best candidates (`choice`)."""
