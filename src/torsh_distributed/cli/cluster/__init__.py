"""Jobs on clusters: `torsh submit`, `torsh jobs`, `torsh logs`, `torsh cancel`, `torsh render`."""
