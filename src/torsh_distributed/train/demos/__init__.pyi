from torsh_distributed.train.demos.base import Demo as Demo
from torsh_distributed.train.demos.demo_plan import DEFAULTS as DEFAULTS
from torsh_distributed.train.demos.registry import DEMOS as DEMOS
