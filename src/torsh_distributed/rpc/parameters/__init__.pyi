from torsh_distributed.rpc.parameters.parameter_client import ParameterClient as ParameterClient
from torsh_distributed.rpc.parameters.parameter_follower import ParameterFollower as ParameterFollower
from torsh_distributed.rpc.parameters.parameter_follower import Publication as Publication
from torsh_distributed.rpc.parameters.parameter_server import ParameterServer as ParameterServer
from torsh_distributed.rpc.parameters.parameter_server import serve as serve
from torsh_distributed.rpc.parameters.push_rounds import Consistency as Consistency
from torsh_distributed.rpc.parameters.server_stats import ServerStats as ServerStats
from torsh_distributed.rpc.parameters.shard import RowTable as RowTable
