"""What went wrong in runs, and what may next: `incident_history` reads incidents and their statistics, `risk` scores
trends that end in one."""
