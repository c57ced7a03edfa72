from torsh_distributed.parallel.mesh.layout import MeshLayout as MeshLayout
from torsh_distributed.parallel.mesh.mesh import Mesh as Mesh
