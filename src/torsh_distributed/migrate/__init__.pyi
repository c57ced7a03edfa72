from torsh_distributed.migrate import horovod as horovod
from torsh_distributed.migrate.stand_in import install as install
from torsh_distributed.migrate.stand_in import uninstall as uninstall
