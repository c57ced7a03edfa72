"""DeepSpeed configs: `deepspeed_config` is the door, `known_keys` the table of all keys, `translators` make a plan."""
