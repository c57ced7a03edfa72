"""How a model is split, before anything is changed: `planned_rows` names the ways, `declared_plan` reads what a
model says, `tensor_plan` puts the table together."""
