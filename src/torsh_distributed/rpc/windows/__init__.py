"""Memory of a worker that others read and write without its help: `window` allocates, opens and accesses it."""
