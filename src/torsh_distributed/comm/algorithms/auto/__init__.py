"""`algorithm="auto"`: measure the links (`link_figures`), then try the best candidates (`choice`)."""
