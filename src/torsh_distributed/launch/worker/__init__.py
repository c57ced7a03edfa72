"""The worker's side: `environment` reads who it is, `init` joins the world; progress and event files."""
