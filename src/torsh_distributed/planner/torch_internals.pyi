# Shapes, dtypes and storages without memory; public nowhere.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException

# Sees every operation; documented by torch, and public nowhere.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Nested inputs and outputs of a block; documented by torch, and public nowhere.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

MEMBERS: dict[str, str]
