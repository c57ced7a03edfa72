"""`torsh doctor` and `torsh collect`: is this machine fit, what is a job doing, what to send with a bug report."""
