from torsh_distributed.elastic.faults.fault import Fault as Fault
from torsh_distributed.elastic.faults.fault import FaultKind as FaultKind
from torsh_distributed.elastic.faults.fault import random_faults as random_faults
from torsh_distributed.elastic.faults.inflicting import InjectedFault as InjectedFault
from torsh_distributed.elastic.faults.injector import inject as inject
