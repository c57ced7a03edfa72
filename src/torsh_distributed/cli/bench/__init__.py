"""`torsh bench`: one file per benchmark, and what its workers run."""
