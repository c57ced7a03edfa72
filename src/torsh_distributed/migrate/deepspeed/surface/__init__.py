"""The smaller modules that scripts import from DeepSpeed; `deepspeed_modules` beside this folder names them all."""
