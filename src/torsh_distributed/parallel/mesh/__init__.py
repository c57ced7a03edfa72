"""The mesh: `layout` is arithmetic, `mesh` owns the groups; gradient norms and means over its axes."""
