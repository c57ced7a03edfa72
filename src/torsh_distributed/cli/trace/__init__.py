"""`torsh trace`, `torsh why`, `torsh tune`: what a recorded run shows, why it is slow, and whether a change helps."""
