"""`torsh run`: `command` reads torchrun's flags, declared in `options`, into a JobSpec; `option_values` checks them."""
