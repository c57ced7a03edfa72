from torsh_distributed.launch.job import launch_job as launch_job
from torsh_distributed.launch.spec import Entry as Entry
from torsh_distributed.launch.spec import JobSpec as JobSpec
from torsh_distributed.launch.worker.environment import Environment as Environment
from torsh_distributed.launch.worker.environment import read_environment as read_environment
from torsh_distributed.launch.worker.init import distributed as distributed
from torsh_distributed.launch.worker.init import init as init
from torsh_distributed.launch.worker.init import init_process_group as init_process_group
