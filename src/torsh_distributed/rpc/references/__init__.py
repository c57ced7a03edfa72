"""Objects that stay where they are: `rref` is a reference, `object_table` its owner's side, `held_references` ours."""
