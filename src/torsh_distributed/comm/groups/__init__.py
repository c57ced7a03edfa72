"""Process groups: `process_group` brings up the world, `manager` makes the others, `abort` releases blocked calls."""
