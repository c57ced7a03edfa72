"""Looking at jobs: `torsh dashboard`, `torsh top`, `torsh compare`, and the options of `torsh run` and `torsh demo`."""
