"""The sections that split a model over ranks: `mesh` gives the degree of each axis, the others its details."""
