"""`torsh checkpoint`: look at checkpoints, verify, compare, remove and exchange them; `commands` names them all."""
