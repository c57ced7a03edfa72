"""Carbon intensity of a grid: `intensity` has the values, `feeds` get them, `grid_watch` keeps them fresh."""
