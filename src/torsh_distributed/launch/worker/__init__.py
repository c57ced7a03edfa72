"""Code that runs in workers: `environment` finds the rank, `init` joins the world; then progress and event files."""
