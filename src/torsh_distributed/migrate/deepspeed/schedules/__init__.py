"""DeepSpeed's schedules: learning rates (`base` first), difficulty of the curriculum, layer drop."""
