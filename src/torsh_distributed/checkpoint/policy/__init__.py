"""When a checkpoint is saved (`save_triggers`, `preemption`) and which are kept (`retention`)."""
