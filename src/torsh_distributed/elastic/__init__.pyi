from torsh_distributed.elastic.faults.fault import Fault as Fault
from torsh_distributed.elastic.faults.fault import FaultKind as FaultKind
from torsh_distributed.elastic.faults.fault import random_faults as random_faults
from torsh_distributed.elastic.faults.inflicting import InjectedFault as InjectedFault
from torsh_distributed.elastic.faults.injector import inject as inject
from torsh_distributed.elastic.scaling import JobLoad as JobLoad
from torsh_distributed.elastic.scaling import LoadPolicy as LoadPolicy
from torsh_distributed.elastic.scaling import scale_by as scale_by
