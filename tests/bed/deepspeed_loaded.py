"""Importing this imports DeepSpeed itself: `world.run(…, imports=("tests.bed.deepspeed_loaded",))` does so once."""

from __future__ import annotations

from tests.bed.real_deepspeed import use_deepspeed

use_deepspeed()
