"""Process groups: `process_group` brings up the first, `manager` makes the others, `abort` releases what is blocked."""
