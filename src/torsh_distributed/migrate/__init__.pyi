from torsh_distributed.migrate import deepspeed as deepspeed
from torsh_distributed.migrate import fairscale as fairscale
from torsh_distributed.migrate import horovod as horovod
from torsh_distributed.migrate.report import KeyVerdict as KeyVerdict
from torsh_distributed.migrate.report import MigrationReport as MigrationReport
from torsh_distributed.migrate.report import Verdict as Verdict
from torsh_distributed.migrate.stand_in import install as install
from torsh_distributed.migrate.stand_in import uninstall as uninstall
